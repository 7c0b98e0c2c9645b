//! Requests as they arrive: their rows, and what these say about their sequences.

use std::sync::Arc;
use std::time::Instant;

use sequences::SequenceId;
use sequences::scheduler::{Control, Origin, Refused, Scheduler};
use smallvec::{SmallVec, smallvec};
use state_store::Keeper;

use crate::batch::decode::{ControlReader, Expected};
use crate::batch::state_api::{conflict, several_rows};
use crate::batch::{Decoded, Row, TellsId};
use crate::binding::RequestInput;
use crate::error::{InputError, LoadError, RequestError};
use crate::model::Model;
use crate::panic;
use crate::triton::Request;

/// A request in the scheduler. The variants are boxed, because each sequence has room for four requests.
pub(super) enum Queued {
    /// It came at this time.
    New(Box<Decoded>, Instant),
    /// It has made steps, and has some left.
    UnderWay(Box<Row>),
}

impl Queued {
    pub fn request(&self) -> &Request {
        match self {
            Self::New(of, _) => &of.request,
            Self::UnderWay(row) => &row.request,
        }
    }

    pub fn into_request(self) -> Request {
        match self {
            Self::New(of, _) => of.request,
            Self::UnderWay(row) => row.request,
        }
    }

    /// The request, if it has made no step.
    pub fn decoded(&self) -> Option<&Decoded> {
        if let Self::New(of, _) = self { Some(of) } else { None }
    }
}

pub(super) struct Read {
    pub decoded: Decoded,
    pub starts: Option<SequenceId>,
    pub control: Result<Control, Unfit>,
}

/// Why a row does not run; `None` if the reason is another row of its request.
pub(super) type Unfit = Option<Box<RequestError>>;

pub(super) fn unfit((queued, why): (Queued, Refused)) -> (Request, Unfit) {
    (queued.into_request(), Some(Box::new(why.into())))
}

/// The same, of a sequence that may be in the store, although its state here is gone.
pub(super) fn moved((queued, why): (Queued, Refused)) -> (Request, Unfit) {
    match why {
        Refused::Missing(id) => unfit((queued, Refused::Moved(id))),
        why => unfit((queued, why)),
    }
}

/// Makes all rows of a request unfit if one of them cannot be queued.
pub(super) fn all_or_none(mut rows: SmallVec<[Read; 1]>, scheduler: &Scheduler<Queued>) -> SmallVec<[Read; 1]> {
    let controls: Vec<_> = rows.iter().filter_map(|read| read.control.as_ref().ok()).collect();
    let fault = if controls.len() < rows.len() { None } else { Some(scheduler.check(&controls)) };
    let (at, mut why) = match fault {
        Some(Ok(())) => return rows,
        Some(Err((row, why))) => (row, Some(Box::new(why.into()))),
        None => (rows.len(), None),
    };
    for (row, read) in rows.iter_mut().enumerate().filter(|(_, read)| read.control.is_ok()) {
        read.control = Err(if row == at { why.take() } else { None });
    }
    rows
}

pub(super) struct Reader {
    pub expected: Expected,
    control: ControlReader,
    tells_id: TellsId,
    keeper: Option<Arc<Keeper>>,
}

impl Reader {
    pub fn new(model: &Model) -> Result<Self, LoadError> {
        let dims: &[i64] = if model.config.is_batched() { &[1, 1] } else { &[1] };
        // The model for initial states reads the inputs, too, and it runs on the host.
        let device = model.only_site()?.device.as_ref().map(|device| device.number());
        let gpu = device.filter(|_| model.initial_model.is_none());
        // A call of the State API may carry no inputs.
        let needs = |of: &RequestInput| model.state_api.is_none() && !of.optional && !of.is_held;
        let required = model.binding.request_inputs().filter(|(_, of)| needs(of)).count();
        Ok(Self {
            expected: Expected::new(&model.binding, model.state_api.as_ref(), gpu),
            control: ControlReader::new(model.config.takes_ids, required),
            tells_id: TellsId { output_dims: model.config.takes_ids.output.then_some(dims) },
            keeper: model.keeper.clone(),
        })
    }

    /// Whether a request may drain the server; `None` if it has START or an id, or does not ask for that.
    pub fn may_drain(&self, request: &Request) -> Option<Result<(), RequestError>> {
        let is_of_sequence =
            !matches!(request.sequence_id(), Ok(None)) || !matches!(request.start_and_end(), Ok((false, _)));
        if is_of_sequence {
            return None;
        }
        Some(match self.expected.state.drains(request)? {
            Ok(true) if self.keeper.is_some() => Ok(()),
            Ok(true) => {
                Err(conflict("'drain' saves all sequences in the model's 'state_store', but the model has none").into())
            }
            Ok(false) => Err(conflict("'drain' cannot be undone: unload the model, and load it again").into()),
            Err(error) => Err(error.into()),
        })
    }

    /// The rows of each request. A row that cannot be read has its problem as its control.
    pub fn read_all(&self, requests: Vec<Request>) -> Vec<SmallVec<[Read; 1]>> {
        let mut read: Vec<_> = requests.into_iter().map(|request| self.read(request)).collect();
        self.expected.fetch(read.iter_mut().flatten().map(|read| &mut read.decoded));
        for Read { decoded, control, .. } in read.iter_mut().flatten() {
            if let Some(problem) = decoded.problem.take() {
                *control = Err(Some(problem));
            }
        }
        read
    }

    /// The rows of a request: one, unless its special inputs have several.
    fn read(&self, mut request: Request) -> SmallVec<[Read; 1]> {
        let mut starts = None;
        let mut read = |request: &mut Request| {
            let mut controls = self.control.read(request)?;
            if let [control] = controls.as_slice() {
                starts = control.id.as_ref().filter(|_| control.start).cloned();
            }
            let asked = self.expected.state.parameters(request)?;
            if let (Some(asked), [control]) = (&asked, controls.as_mut_slice()) {
                if asked.resume && control.id.is_none() {
                    return Err(conflict("'resume' needs the id of the parked sequence").into());
                }
                if asked.clone_of.is_some() && self.keeper.as_ref().is_some_and(|keeper| keeper.is_shared()) {
                    // Only a request of a sequence asks the store whether the state here is the newest.
                    let why = "with 'state_store', another server may have a newer state of the sequence of \
                               'clone_of': read a snapshot of it, and start with that";
                    return Err(conflict(why).into());
                }
                control.end |= asked.delete;
                control.origin = match &asked.clone_of {
                    Some(id) => Origin::Clone(id.clone()),
                    None if asked.resume => Origin::Parked,
                    None => Origin::Own,
                };
            } else if asked.is_some() {
                return Err(several_rows().into());
            }
            if controls.len() > 1 && self.expected.make_steps() {
                return Err(InputError::SeveralSequences(controls.len()).into());
            }
            Ok((controls, asked))
        };
        // By reference: after a panic, the request is still here to be answered.
        let (controls, mut asked) = match panic::catch_result(|| read(&mut request)) {
            Ok(read) => read,
            Err(error) => {
                let (decoded, control) = (Decoded::new(request), Err(Some(Box::new(error))));
                return smallvec![Read { decoded, starts, control }];
            }
        };
        let rows = if controls.len() == 1 { vec![request] } else { request.split(controls.len()) };
        let read = |(request, control): (Request, Control)| {
            let decoded = self.expected.decode_row(request, control.start, control.end, self.tells_id, asked.take());
            let starts = control.id.as_ref().filter(|_| control.starts_anew()).cloned();
            Read { decoded, starts, control: Ok(control) }
        };
        rows.into_iter().zip(controls).map(read).collect()
    }
}
