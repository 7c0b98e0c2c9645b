use stateful_convert::verify::*;
fn main() {
    let mut files: Vec<_> = std::env::args().skip(1).collect();
    files.sort();
    let env = environment(std::path::Path::new(&std::env::var("ORT_DYLIB_PATH").unwrap())).unwrap();
    for file in files {
        let bytes = std::fs::read(&file).unwrap().into();
        let name = file.rsplit('/').next().unwrap().to_owned();
        match stateful_convert::convert(bytes, &Default::default()) {
            Ok(c) => {
                std::fs::write("/tmp/c.onnx", &c.model).unwrap();
                let init = c.initial_states.as_ref().map(|b| { std::fs::write("/tmp/i.onnx", b).unwrap(); std::path::Path::new("/tmp/i.onnx") });
                let r = verify(&env, &Models { original: file.as_ref(), converted: "/tmp/c.onnx".as_ref(), initial_states: init }, &c.report, None);
                match r { Ok(r) => println!("OK   {name}: {:?}", r.iter().map(|c| (c.what.clone(), c.largest)).collect::<Vec<_>>()),
                 Err(e) => println!("BAD  {name}: {e}") }
            }
            Err(e) => println!("ERR  {name}: {}", e.to_string().lines().next().unwrap()),
        }
    }
}
