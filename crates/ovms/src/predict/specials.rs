//! The two special inputs, `sequence_id` and `sequence_control_input`, checked as OVMS checks them.

use crate::triton::Failure;

/// An input, and an output with the same id.
pub const SEQUENCE_ID: &str = "sequence_id";
pub const SEQUENCE_CONTROL_INPUT: &str = "sequence_control_input";

const START: u32 = 1;
const END: u32 = 2;

/// A special input as it came: nothing is checked yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Special<T> {
    /// Empty if the client sent no shape.
    pub shape: Vec<i64>,
    /// The value, if there is exactly one in the field for the type.
    pub value: Option<T>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Specials {
    pub sequence_id: Option<Special<u64>>,
    pub control: Option<Special<u32>>,
}

/// Special inputs that have passed the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// 0: the server chooses it.
    pub id: u64,
    /// 0, 1 for START, 2 for END.
    pub control: u32,
}

impl Specials {
    /// The id, or 0.
    pub fn id(&self) -> u64 {
        // The id counts even if the rest is wrong, because the request still has its place in the order of the sequence.
        self.sequence_id.as_ref().and_then(|special| special.value).unwrap_or(0)
    }

    /// In OVMS's order: the id's shape and value, those of the control, the control's meaning, the id's presence.
    pub fn check(&self) -> Result<Sequence, Failure> {
        let text = "Could not find sequence id in expected tensor proto field uint64_val";
        let id = self.sequence_id.as_ref().map_or(Ok(0), |special| special.check(SEQUENCE_ID, text))?;
        let text = "Could not find sequence control input in expected tensor proto field uint32_val";
        let control = self.control.as_ref().map_or(Ok(0), |special| special.check(SEQUENCE_CONTROL_INPUT, text))?;
        if control > END {
            return Err(Failure::invalid("Unexpected value of sequence control input"));
        }
        // A START without an id lets the server choose one.
        if control != START && id == 0 {
            return Err(Failure::invalid("Sequence ID has not been provided in request inputs"));
        }
        Ok(Sequence { id, control })
    }
}

impl<T: Copy> Special<T> {
    pub fn new(shape: Vec<i64>, values: &[T]) -> Self {
        Self { shape, value: if let [value] = *values { Some(value) } else { None } }
    }

    fn check(&self, name: &str, no_value: &str) -> Result<T, Failure> {
        let wrong = |what: &str| Failure::invalid(format!("{what} - Required shape for {name} is: (1)"));
        match self.shape[..] {
            [] => Err(Failure::invalid("Special input proto does not contain tensor shape information")),
            [1] => self.value.ok_or_else(|| Failure::invalid(no_value)),
            [_] => Err(wrong("Invalid input shape")),
            _ => Err(wrong("Invalid number of shape dimensions")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specials(id: Option<(&[i64], Option<u64>)>, control: Option<(&[i64], Option<u32>)>) -> Specials {
        Specials {
            sequence_id: id.map(|(shape, value)| Special { shape: shape.to_vec(), value }),
            control: control.map(|(shape, value)| Special { shape: shape.to_vec(), value }),
        }
    }

    fn message(specials: &Specials) -> String {
        let failure = specials.check().unwrap_err();
        assert_eq!(failure.code, tonic::Code::InvalidArgument);
        failure.message
    }

    #[test]
    fn a_start_needs_no_id_and_everything_else_does() {
        let start = Some((&[1][..], Some(START)));
        assert_eq!(specials(None, start).check(), Ok(Sequence { id: 0, control: START }));
        assert_eq!(specials(Some((&[1], Some(0))), start).check(), Ok(Sequence { id: 0, control: START }));
        assert_eq!(specials(Some((&[1], Some(7))), None).check(), Ok(Sequence { id: 7, control: 0 }));
        let absent = "Sequence ID has not been provided in request inputs";
        assert_eq!(message(&specials(None, None)), absent);
        assert_eq!(message(&specials(None, Some((&[1], Some(END))))), absent);
        assert_eq!(message(&specials(Some((&[1], Some(0))), Some((&[1], Some(0))))), absent);
    }

    #[test]
    fn the_id_s_shape_is_checked_before_its_value_and_before_the_control() {
        let bad_control = Some((&[][..], Some(999)));
        assert_eq!(
            message(&specials(Some((&[], Some(1))), bad_control)),
            "Special input proto does not contain tensor shape information"
        );
        assert_eq!(
            message(&specials(Some((&[1, 1], None)), bad_control)),
            "Invalid number of shape dimensions - Required shape for sequence_id is: (1)"
        );
        assert_eq!(
            message(&specials(Some((&[2], None)), bad_control)),
            "Invalid input shape - Required shape for sequence_id is: (1)"
        );
        assert_eq!(
            message(&specials(Some((&[1], None)), bad_control)),
            "Could not find sequence id in expected tensor proto field uint64_val"
        );
    }

    #[test]
    fn the_control_s_value_is_checked_before_the_id_s_presence() {
        assert_eq!(
            message(&specials(None, Some((&[1], None)))),
            "Could not find sequence control input in expected tensor proto field uint32_val"
        );
        assert_eq!(
            message(&specials(None, Some((&[3], Some(0))))),
            "Invalid input shape - Required shape for sequence_control_input is: (1)"
        );
        assert_eq!(message(&specials(None, Some((&[1], Some(3))))), "Unexpected value of sequence control input");
    }
}
