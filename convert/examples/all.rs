fn main() {
    let mut files: Vec<_> = std::env::args().skip(1).collect();
    files.sort();
    for file in files {
        let bytes = std::fs::read(&file).unwrap().into();
        let name = file.rsplit('/').next().unwrap().to_owned();
        match stateful_convert::convert(bytes, &Default::default()) {
            Ok(c) => {
                println!("OK   {name}: {:?} init={} {:?}", c.report.states.iter().map(|s| format!("{} {} {:?}", s.pair.input, stateful_convert::list(&s.dims), s.starts_at)).collect::<Vec<_>>(), c.initial_states.is_some(), c.report.warnings);
            }
            Err(e) => println!("ERR  {name}: {e}"),
        }
    }
}
