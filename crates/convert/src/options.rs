//! The options that the command and its subcommand share.

use std::path::PathBuf;

use stateful_convert::InputAxis;
use stateful_convert::recordings;
use stateful_convert::verify::Given;

use crate::problem::Problem;

/// What `--version` says. `scripts/release` adds the commit.
pub const VERSION: &str = match option_env!("STATEFUL_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

#[derive(clap::Args)]
pub struct Shared {
    /// The converted model. A config.pbtxt goes beside it, or beside its folder if that is named after a version. Folders
    /// that are missing are made
    #[arg(short, long, value_name = "FILE", required_unless_present = "dry_run")]
    pub output: Option<PathBuf>,
    /// What the comparison gives to inputs, as in sr=16000,input@1=576: a value for each element, or the length of an
    /// open axis; and recordings: a file of NumPy, FILE.npz, with arrays of the names of inputs [default: random values,
    /// short axes]
    #[arg(long, value_name = "INPUT=VALUE|FILE.npz", value_delimiter = ',', value_parser = given)]
    pub compare_with: Vec<GivenInput>,
    /// Convert and compare, and write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Replace files that exist
    #[arg(long)]
    pub force: bool,
    /// Write no config.pbtxt
    #[arg(long)]
    pub no_config: bool,
    /// Print what was done as JSON
    #[arg(long)]
    pub json: bool,
    /// ONNX Runtime's library [default: ORT_DYLIB_PATH, or libonnxruntime.so of the backend's folder]
    #[arg(long, value_name = "FILE")]
    ort_library: Option<PathBuf>,
}

#[derive(Clone, Debug)]
pub enum GivenInput {
    Length(InputAxis, i64),
    Value(String, f64),
    Recordings(PathBuf),
}

impl Shared {
    pub fn given(&self, chunk: Option<i64>) -> Result<Given, Problem> {
        let mut given = Given { chunk, ..Given::default() };
        for input in &self.compare_with {
            match input {
                GivenInput::Length(axis, length) => given.lengths.push((axis.clone(), *length)),
                GivenInput::Value(input, value) => given.values.push((input.clone(), *value)),
                GivenInput::Recordings(path) => {
                    let read = recordings::read(path);
                    given.recordings.extend(read.map_err(|why| Problem::Recordings { path: path.clone(), why })?);
                }
            }
        }
        Ok(given)
    }

    pub fn library(&self) -> Result<PathBuf, Problem> {
        let environment = std::env::var_os("ORT_DYLIB_PATH").filter(|path| !path.is_empty()).map(PathBuf::from);
        let program = std::env::current_exe().ok();
        // scripts/build puts the program and the backend there.
        let beside =
            program.and_then(|program| Some(program.parent()?.parent()?.join("backends/stateful/libonnxruntime.so")));
        let found = self.ort_library.clone().or(environment).or(beside.filter(|path| path.exists()));
        found.ok_or(Problem::NoLibrary)
    }
}

pub fn input_axis(text: &str) -> Result<InputAxis, String> {
    let axis = text
        .rsplit_once('@')
        .and_then(|(input, axis)| Some(InputAxis { input: input.to_owned(), axis: axis.parse().ok()? }));
    axis.ok_or_else(|| format!("INPUT@AXIS is expected, not '{text}'"))
}

pub fn given(text: &str) -> Result<GivenInput, String> {
    if text.ends_with(".npz") {
        return Ok(GivenInput::Recordings(text.into()));
    }
    let expected = || format!("INPUT=VALUE, INPUT@AXIS=LENGTH or FILE.npz is expected, not '{text}'");
    let (input, value) = text.rsplit_once('=').ok_or_else(expected)?;
    if input.contains('@') {
        let length = value.parse().ok().filter(|&length| length > 0).ok_or_else(expected)?;
        return Ok(GivenInput::Length(input_axis(input)?, length));
    }
    Ok(GivenInput::Value(input.to_owned(), value.parse().map_err(|_| expected())?))
}
