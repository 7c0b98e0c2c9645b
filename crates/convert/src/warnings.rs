//! What the user of a converted model should know, with the options that help.

use stateful_convert::StatePair;
use stateful_convert::onnx::Dim;
use stateful_convert::report::{Report, Role, StepInput, Warning};

use crate::problem::option;

pub fn of(report: &Report) -> Vec<String> {
    report.warnings.iter().map(with_option).chain(unpaired(report)).collect()
}

fn with_option(warning: &Warning) -> String {
    warning.hint().map_or_else(|| warning.to_string(), |hint| format!("{warning}; {}", option(hint)))
}

fn unpaired(report: &Report) -> Option<String> {
    // What requests carry comes first, in models of single steps.
    let first = usize::from(report.time.is_empty());
    let inputs: Vec<&StepInput> = report.inputs.iter().skip(first).filter(|input| input.role == Role::Other).collect();
    let pair = |input: &&StepInput| {
        let alike = |elem: i32, dims: &[Dim]| elem == input.elem && dims == input.dims;
        let mut outputs = report.outputs.iter().filter(|output| alike(output.elem, &output.dims));
        let output = outputs.next().filter(|_| outputs.next().is_none())?;
        // With two candidates, a suggestion would be a guess.
        let is_only = inputs.iter().filter(|input| alike(input.elem, &input.dims)).count() == 1;
        is_only.then(|| StatePair { input: input.name.clone(), output: output.name.clone() }.to_string())
    };
    let pairs: Vec<String> = inputs.iter().filter_map(pair).collect();
    let text = format!(
        "by their types and dims, {} may be states, too: if they are, name them with --states; else requests have to carry \
         these inputs",
        pairs.join(" ")
    );
    (!pairs.is_empty()).then_some(text)
}
