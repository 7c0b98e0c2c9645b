use proptest::prelude::*;

use super::*;

fn proto(data_type: TensorFlow, shape: &[i64]) -> TensorProto {
    TensorProto { dtype: data_type as i32, tensor_shape: Some(shape_proto(shape)), ..TensorProto::default() }
}

fn read(proto: &TensorProto) -> Result<Tensor, Failure> {
    Tensor::from_proto("x", proto, &mut Expansion::new())
}

fn message(proto: &TensorProto) -> String {
    read(proto).unwrap_err().message
}

#[test]
fn each_type_is_read_from_its_field() {
    let shape = [2];
    let cases = [
        (TensorProto { bool_val: vec![true, false], ..proto(TensorFlow::DtBool, &shape) }, vec![1, 0]),
        (TensorProto { int_val: vec![255, 0], ..proto(TensorFlow::DtUint8, &shape) }, vec![255, 0]),
        (TensorProto { int_val: vec![-1, 1], ..proto(TensorFlow::DtInt8, &shape) }, vec![255, 1]),
        (TensorProto { int_val: vec![-2, 1], ..proto(TensorFlow::DtInt16, &shape) }, vec![254, 255, 1, 0]),
        (TensorProto { int_val: vec![65535, 1], ..proto(TensorFlow::DtUint16, &shape) }, vec![255, 255, 1, 0]),
        (TensorProto { half_val: vec![0x3c00, 0xbc00], ..proto(TensorFlow::DtHalf, &shape) }, vec![0, 0x3c, 0, 0xbc]),
        (TensorProto { half_val: vec![0x3f80, 0], ..proto(TensorFlow::DtBfloat16, &shape) }, vec![0x80, 0x3f, 0, 0]),
        (
            TensorProto { float_val: vec![1.0, -2.0], ..proto(TensorFlow::DtFloat, &shape) },
            [1_f32, -2.0].map(f32::to_le_bytes).concat(),
        ),
        (
            TensorProto { double_val: vec![1.0, -2.0], ..proto(TensorFlow::DtDouble, &shape) },
            [1_f64, -2.0].map(f64::to_le_bytes).concat(),
        ),
        (
            TensorProto { int64_val: vec![i64::MIN, 1], ..proto(TensorFlow::DtInt64, &shape) },
            [i64::MIN, 1].map(i64::to_le_bytes).concat(),
        ),
        (
            TensorProto { uint64_val: vec![u64::MAX, 1], ..proto(TensorFlow::DtUint64, &shape) },
            [u64::MAX, 1].map(u64::to_le_bytes).concat(),
        ),
        (
            TensorProto { string_val: vec!["ab".into(), "".into()], ..proto(TensorFlow::DtString, &shape) },
            b"\x02\0\0\0ab\0\0\0\0".to_vec(),
        ),
    ];
    for (proto, content) in cases {
        let tensor = read(&proto).unwrap();
        assert_eq!(tensor.content, content, "{proto:?}");
        assert_eq!(Tensor::new(tensor.data_type, tensor.shape.clone(), tensor.content.clone()), Ok(tensor));
    }
}

#[test]
fn one_value_stands_for_all_elements() {
    let tensor = read(&TensorProto { int_val: vec![7], ..proto(TensorFlow::DtInt16, &[2, 2]) });
    assert_eq!(tensor.unwrap().content, [7, 0].repeat(4));

    let large = TensorProto { int_val: vec![7], ..proto(TensorFlow::DtInt32, &[1 << 40]) };
    assert!(message(&large).contains("Expected: 1099511627776; Actual: 1"), "{}", message(&large));

    // 64 MiB in all tensors of a request
    let mut expansion = Expansion::new();
    let half = TensorProto { int_val: vec![7], ..proto(TensorFlow::DtUint8, &[32 << 20]) };
    for fits in [true, true, false] {
        let tensor = Tensor::from_proto("x", &half, &mut expansion);
        assert_eq!(tensor.is_ok(), fits);
    }
    let one = TensorProto { int_val: vec![7], ..proto(TensorFlow::DtUint8, &[1]) };
    assert!(Tensor::from_proto("x", &one, &mut expansion).is_ok());
}

#[test]
fn values_of_a_wrong_number_or_size_are_refused_with_the_input_s_name() {
    let few = TensorProto { float_val: vec![1.0; 2], ..proto(TensorFlow::DtFloat, &[3]) };
    assert_eq!(
        message(&few),
        "Invalid number of values in tensor proto container - Expected: 3; Actual: 2; input name: x"
    );
    let many = TensorProto { float_val: vec![1.0; 4], ..proto(TensorFlow::DtFloat, &[3]) };
    assert!(message(&many).contains("Expected: 3; Actual: 4"));
    let none = proto(TensorFlow::DtFloat, &[3]);
    assert!(message(&none).contains("Expected: 3; Actual: 0"));
    let content = TensorProto { tensor_content: vec![0; 11].into(), ..proto(TensorFlow::DtFloat, &[3]) };
    assert_eq!(
        message(&content),
        "Invalid content size of tensor proto - Expected: 12 bytes; Actual: 11 bytes; input name: x"
    );
    let strings = TensorProto { string_val: vec!["a".into()], ..proto(TensorFlow::DtString, &[2]) };
    assert!(message(&strings).contains("Expected: 2; Actual: 1"), "one string doesn't stand for all");
    let range = TensorProto { int_val: vec![256], ..proto(TensorFlow::DtUint8, &[1]) };
    assert!(message(&range).contains("a value is out of range"));
}

#[test]
fn shapes_and_types_that_cannot_be_are_refused() {
    assert!(message(&proto(TensorFlow::DtFloat, &[-1])).starts_with("Invalid input shape"));
    assert!(message(&proto(TensorFlow::DtFloat, &[i64::MAX, i64::MAX])).starts_with("Invalid input shape"));
    assert!(message(&proto(TensorFlow::DtInvalid, &[1])).starts_with("Invalid input precision"));
    let empty = read(&proto(TensorFlow::DtFloat, &[0, i64::MAX, i64::MAX]));
    assert_eq!(empty.unwrap().content.len(), 0);
}

#[test]
fn a_content_of_another_size_than_the_shape_says_is_an_error() {
    assert!(Tensor::new(DataType::Fp32, vec![2], vec![0; 8].into()).is_ok());
    assert!(Tensor::new(DataType::Fp32, vec![2], vec![0; 7].into()).is_err());
    assert!(Tensor::new(DataType::Fp32, vec![-2], vec![0; 8].into()).is_err());
    assert!(Tensor::new(DataType::Bytes, vec![2], b"\0\0\0\0\0\0\0\0"[..].into()).is_ok());
    assert!(Tensor::new(DataType::Bytes, vec![1], b"\x05\0\0\0abc"[..].into()).is_err());
}

#[test]
fn each_type_comes_back() {
    let known: Vec<_> = (0..30).filter_map(|number| Some((number, from_tensorflow(number)?))).collect();
    assert_eq!(known.len(), 14);
    for (number, data_type) in known {
        assert_eq!(tensorflow(data_type) as i32, number);
    }
    assert_eq!(from_tensorflow(18), None, "DT_COMPLEX128");
}

proptest! {
    #[test]
    fn numbers_come_back_as_they_were_sent(values in proptest::collection::vec(any::<f32>(), 0..20)) {
        let shape = [values.len() as i64];
        let sent = TensorProto { float_val: values.clone(), ..proto(TensorFlow::DtFloat, &shape) };
        let tensor = read(&sent).unwrap();
        let answer = tensor.clone().into_proto();
        prop_assert_eq!(read(&answer).unwrap(), tensor);
    }

    #[test]
    fn strings_come_back_as_they_were_sent(values in proptest::collection::vec(any::<Vec<u8>>(), 0..20)) {
        let shape = [values.len() as i64];
        let string_val: Vec<Bytes> = values.into_iter().map(Bytes::from).collect();
        let sent = TensorProto { string_val: string_val.clone(), ..proto(TensorFlow::DtString, &shape) };
        let answer = read(&sent).unwrap().into_proto();
        prop_assert_eq!(answer.string_val, string_val);
    }

    #[test]
    fn no_content_of_strings_panics(content: Vec<u8>, elements in 0_i64..4) {
        let _ = Tensor::new(DataType::Bytes, vec![elements], content.into());
    }

    #[test]
    fn no_proto_panics(dtype in 0..30_i32, shape: Vec<i64>, content: Vec<u8>, int_val: Vec<i32>, half_val: Vec<i32>) {
        let proto = TensorProto {
            dtype, tensor_shape: Some(shape_proto(&shape)), tensor_content: content.into(), int_val, half_val,
            ..TensorProto::default()
        };
        let _ = read(&proto);
    }
}
