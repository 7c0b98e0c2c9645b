//! A greedy search inside the joined graph: its last graphs find tokens, so that responses have these.
//!
//! Rules: each row has its own position in time, so rows don't change each other's tokens. Tokens are packed to the left of
//! their row, `tokens_length` says how many there are, and the width depends on the frames only, so that an answer tells
//! nothing about other rows.

mod nodes;
mod options;
mod pieces;
mod plan;
mod transducer;

use super::part::{Read, Result};
use super::rename::Names;
use super::wires::Link;
use crate::batch::{is_batch_name, is_made_up};
use crate::onnx::schema::{GraphProto, ValueInfoProto};
use crate::onnx::{DataType, Dim, int64s};
use crate::pairs::StatePair;
use crate::report::InitialState;

pub use options::{
    FRAMES, LAST, LAST_NEXT, LENGTHS, NO_TOKEN, OPSET, PIECES, SEARCH, SKIP, SKIP_NEXT, Search, SearchKind, TOKENS,
};
pub use pieces::read_pieces;
pub use plan::{CtcPlan, Joint, TransducerPlan};

#[derive(Clone, Debug)]
pub enum SearchPlan {
    Ctc(CtcPlan),
    Transducer(Box<TransducerPlan>),
}

/// The plan of a search over these graphs. `pieces` are the texts of the tokens, if responses have them.
pub fn plan(parts: &[Read], links: &[Link], search: &Search, pieces: Option<&[String]>) -> Result<SearchPlan> {
    if let (Some(pieces), Some(part)) = (pieces, parts.last()) {
        let output = plan::logits(part, parts, search)?;
        pieces::check(pieces, plan::token_count(output, search), &part.full(output.name()))?;
    }
    match &search.kind {
        SearchKind::Ctc => plan::ctc(parts, search).map(SearchPlan::Ctc),
        SearchKind::Transducer { max_tokens, durations } => {
            plan::transducer(parts, links, search, (*max_tokens, durations))
                .map(|plan| SearchPlan::Transducer(plan.into()))
        }
    }
}

impl SearchPlan {
    pub fn first_inside(&self, parts: usize) -> usize {
        match self {
            Self::Ctc(_) => parts,
            Self::Transducer(plan) => plan.predictor,
        }
    }

    /// Whether the search takes frames by this link, one or several at a time.
    pub fn takes_frames(&self, link: &Link) -> bool {
        match self {
            Self::Ctc(_) => false,
            Self::Transducer(plan) => link.to.graph == plan.joint && link.to.tensor == plan.frames_input,
        }
    }

    /// The tensor of the joined graph that the search reads.
    pub fn source(&self) -> &str {
        match self {
            Self::Ctc(plan) => &plan.logits,
            Self::Transducer(plan) => &plan.frames,
        }
    }

    /// Whether a jump may end behind the chunk.
    pub fn has_durations(&self) -> bool {
        matches!(self, Self::Transducer(plan) if !plan.durations.is_empty())
    }

    /// Where the last tokens start, unless that is 0.
    pub fn initial(&self) -> Option<InitialState> {
        let blank = match self {
            Self::Ctc(plan) => plan.blank,
            Self::Transducer(plan) => plan.blank,
        };
        (blank != 0).then(|| InitialState { state: LAST.to_owned(), value: Some(blank.to_string()) })
    }

    /// Adds the search to the joined graph, and its state. `inside` are the graphs that it runs.
    pub fn add(
        &self,
        graph: &mut GraphProto,
        inside: &mut [Read],
        names: &mut [Names],
        pieces: Option<&[String]>,
    ) -> Vec<StatePair> {
        let mut values = graph.output.iter().chain(&graph.input);
        let rows = values.find(|value| value.name() == self.source()).and_then(|value| value.dims()?.first().cloned());
        // Exporters may number the batch of each tensor. The backend knows it by its usual name.
        let rows = match rows {
            Some(Dim::Known(rows)) => Dim::Known(rows),
            Some(Dim::Symbol(name)) if is_batch_name(&name) || is_made_up(&name) => Dim::Symbol(name),
            _ => Dim::Symbol("batch".to_owned()),
        };
        match self {
            Self::Ctc(plan) => nodes::add_ctc(graph, plan),
            Self::Transducer(plan) => transducer::add(graph, plan, inside, names, &rows),
        }
        let (elem, context) = match self {
            Self::Ctc(_) => (DataType::Int64.into(), 1),
            Self::Transducer(plan) => (plan.tokens.elem, plan.tokens.context),
        };
        let int64 = DataType::Int64.into();
        let found = [rows.clone(), Dim::Symbol(TOKENS.to_owned())];
        let last = [rows.clone(), Dim::Known(context)];
        graph.input.push(ValueInfoProto::tensor(LAST, elem, &last));
        graph.output.push(ValueInfoProto::tensor(TOKENS, int64, &found));
        graph.output.push(ValueInfoProto::tensor(LENGTHS, int64, &[rows]));
        graph.output.push(ValueInfoProto::tensor(FRAMES, int64, &found));
        if let Some(texts) = pieces {
            pieces::add(graph, texts);
            graph.output.push(ValueInfoProto::tensor(PIECES, DataType::String.into(), &found));
        }
        graph.output.push(ValueInfoProto::tensor(LAST_NEXT, elem, &last));
        graph.initializer.extend(nodes::CONSTANTS.map(|(name, dims, values)| int64s(name, dims, values)));
        let mut states = vec![StatePair::new(LAST, LAST_NEXT)];
        if self.has_durations() {
            graph.input.push(ValueInfoProto::tensor(SKIP, int64, std::slice::from_ref(&last[0])));
            graph.output.push(ValueInfoProto::tensor(SKIP_NEXT, int64, std::slice::from_ref(&last[0])));
            states.push(StatePair::new(SKIP, SKIP_NEXT));
        }
        states
    }
}
