//! Follows the steps of an input through a graph: which tensors carry them on which axis, and where a node needs
//! more than the steps so far.
//!
//! Rule: an operator that isn't known to treat steps one by one, or to need earlier ones only in a way that a state can
//! hold, is refused. Nothing is guessed.

mod carried;
mod layers;
mod moves;
mod refusal;
mod rules;
mod tracker;

use std::collections::{HashMap, HashSet};

use crate::graph::{captured, required_inputs};
use crate::infer::tensor::axis_of;
use crate::infer::{Shapes, body_inputs, branch, scan_body_inputs, scan_counts, scan_list};
use crate::onnx::operators::StepsRule;
use crate::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};

use carried::{Carried, LOOP_HELP, check_entry, kind, layouts, loop_output, without_steps};
pub use refusal::{CHECKER, Hint, ONE_STEP, Refusal, Refusals, Result, UNKNOWN_SHAPE, refuse};
use refusal::{ONE_LENGTH, WHOLE_INPUT};
pub use tracker::{Cut, FAR_OVER_SHORT, Found, LONG_OVER_SHORT, Layout, Place, Tracker, common_divisor};

impl<'a> Tracker<'a> {
    pub fn run(&mut self) -> Result<(), Refusals> {
        let mut reached = None;
        for (index, node) in self.graph.node.iter().enumerate() {
            let followed = self.node(index, node).and_then(|places| self.check_dims(node, places));
            let places = match followed {
                Ok(places) => places,
                Err(refusal) => {
                    // What is reached after a node in the way does not count, because it rests on a guess.
                    reached.get_or_insert(self.found.reached);
                    self.found.stopped_at.get_or_insert(index);
                    if !self.refused.contains(&refusal) {
                        self.refused.push(refusal);
                    }
                    node.output.iter().map(|name| self.likely_place(name)).collect()
                }
            };
            for (output, name) in node.output.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
                let place = places.get(output).copied().unwrap_or(Place::Free);
                if place == Place::Free && self.depends_on_length(node, name) {
                    self.sized.insert(name.clone());
                }
                if place == Place::Free {
                    // Asked now, while all sources have answers, so that no later question goes back through many
                    // nodes.
                    let rank = self.dims(name).map_or(0, <[i64]>::len);
                    (0..rank).for_each(|axis| _ = self.is_steady(name, Some(axis)));
                }
                // What is computed from states alone is known before the first step.
                if place == Place::Last && self.is_of_states(node) {
                    self.of_states.insert(name.clone());
                }
                if place == Place::Certain {
                    let refusal = node.input.iter().find_map(|input| self.certain.get(input)).cloned();
                    self.certain.insert(name.clone(), refusal.unwrap_or_else(|| moves::certain(node)));
                }
                self.found.places.insert(name.clone(), place);
            }
        }
        let of_outputs = self.graph.output.iter().filter_map(|value| self.certain.get(value.name()).cloned());
        for refusal in of_outputs {
            if !self.refused.contains(&refusal) {
                self.refused.push(refusal);
            }
        }
        self.found.reached = reached.unwrap_or(self.found.reached);
        Refusals::new(std::mem::take(&mut self.refused)).map_or(Ok(()), Err)
    }

    /// Refuses an output of the graph that isn't the steps alone, or that has no steps and depends on how many there
    /// are.
    pub fn check_outputs(&self) -> Result<()> {
        for name in self.graph.output.iter().map(ValueInfoProto::name) {
            let why = match self.place(name) {
                Place::At(layout) if layout.is_padded() => "has padding beside its steps",
                Place::Sequence { .. } => "is a sequence of steps",
                _ => continue,
            };
            let output = NodeProto::make("output", name, &[], &[]);
            return Err(refuse(&output, why, "give out a tensor that has an entry for each step"));
        }
        let Some(value) = self.graph.output.iter().find(|value| self.sized.contains(value.name())) else {
            return Ok(());
        };
        let producer = self.producers.get(value.name()).map(|&index| self.graph.node[index].clone());
        let node = producer.unwrap_or_else(|| NodeProto::make("output", value.name(), &[], &[]));
        let why = format!("gives '{}', which depends on the length of the whole input", value.name());
        Err(refuse(&node, why, WHOLE_INPUT))
    }

    /// Refuses outputs with an axis beside the steps whose length depends on how many steps there are.
    fn check_dims(&self, node: &NodeProto, places: Vec<Place>) -> Result<Vec<Place>> {
        for (name, place) in node.output.iter().zip(&places) {
            let axis_of_steps = match place {
                Place::At(layout) => Some(layout.axis),
                Place::Last => None,
                _ => continue,
            };
            // An unknown shape is refused by the rule that needs it.
            let Some(short) = self.short.dims(name) else { continue };
            for other in [self.long, self.far] {
                let Some(other) = other.dims(name) else { continue };
                let differs = |axis: usize| Some(axis) != axis_of_steps && other.get(axis) != short.get(axis);
                if other.len() != short.len() || (0..short.len()).any(differs) {
                    let why = format!("makes '{name}', whose other axes depend on the length of the whole input");
                    return Err(refuse(node, why, WHOLE_INPUT));
                }
            }
        }
        Ok(places)
    }

    /// Guesses where an output of a refused node has the steps, so that later nodes can be checked: on the only axis
    /// that has their length.
    fn likely_place(&self, name: &str) -> Place {
        let (Some(short), Some(long)) = (self.short.dims(name), self.long.dims(name)) else { return Place::Free };
        let mut axes = (0..short.len()).filter(|&axis| long.get(axis).is_some_and(|&long| long != short[axis]));
        match (axes.next(), axes.next()) {
            (Some(axis), None) => Place::At(Layout::clean(axis, short[axis])),
            _ => Place::Free,
        }
    }

    fn node(&mut self, index: usize, node: &'a NodeProto) -> Result<Vec<Place>> {
        let certain = |name: &String| self.certain.get(name).cloned();
        if let Some(refusal) = node.graphs().flat_map(captured).find_map(|name| certain(&name)) {
            return Err(refusal);
        }
        let rule = node.steps_rule();
        let is_loop = matches!(rule, StepsRule::Loop | StepsRule::Scan | StepsRule::If);
        if let Some(refusal) = node.input.iter().find_map(certain)
            && !node.reads_size()
        {
            let others = |name: &String| matches!(self.place(name), Place::Free | Place::Certain);
            // Certain steps may be computed with, as long as no other steps meet them.
            let stays = !is_loop && node.input.iter().all(others);
            return if stays { Ok(vec![Place::Certain; node.output.len()]) } else { Err(refusal) };
        }
        let reads = |name: &String| self.place(name) != Place::Free;
        if self.follows_rows
            && is_loop
            && (node.input.iter().any(reads) || node.graphs().flat_map(captured).any(|name| reads(&name)))
        {
            let why = "has the rows in its body, where they aren't followed";
            return Err(refuse(node, why, "export the model with an open batch"));
        }
        match rule {
            StepsRule::Loop => return self.loop_node(index, node),
            StepsRule::Scan => return self.scan_node(index, node),
            StepsRule::If => return self.if_node(index, node),
            _ if node.graphs().flat_map(captured).any(|name| reads(&name)) => return Err(rules::unknown(node)),
            _ => {}
        }
        let places: Vec<Place> = node.input.iter().map(|name| self.place(name)).collect();
        if places.iter().all(|&place| place == Place::Free) || node.reads_size() {
            return Ok(vec![Place::Free; node.output.len()]);
        }
        if places.iter().any(|place| matches!(place, Place::At(_))) {
            self.check_shapes(node)?;
        }
        rules::apply(self, index, node, &places)
    }

    fn check_shapes(&self, node: &NodeProto) -> Result<()> {
        let output = node.output.first().map_or("", String::as_str);
        let of = |shapes: &Shapes| shapes.conflicts.iter().find(|(name, _)| name == output).map(|(_, why)| why.clone());
        let Some(why) = of(self.short).or_else(|| of(self.long)) else { return Ok(()) };
        // The steps of another input may have another name.
        let is_open = |input: &&ValueInfoProto| {
            let dims = input.dims().unwrap_or_default();
            self.place(input.name()) == Place::Free && dims.iter().any(|dim| !dim.is_known())
        };
        let open: Vec<&str> = required_inputs(self.graph).filter(is_open).map(ValueInfoProto::name).collect();
        let why = format!("{ONE_LENGTH} ({why})");
        if open.is_empty() {
            return Err(refuse(node, why, "export the model with a dynamic time axis"));
        }
        let help = format!("if {} has steps, too, name the axes of all inputs that have them", open.join(" or "));
        Err(refuse(node, why, &help).with_hint(Hint::Time))
    }

    /// Follows the steps through a body or a branch. The first node in the way stands for all.
    fn run_inner(&mut self) -> Result<()> {
        self.run().map_err(|refused| *refused.first)
    }

    fn loop_node(&mut self, index: usize, node: &'a NodeProto) -> Result<Vec<Place>> {
        let Some(body) = node.graph("body") else { return Err(refuse(node, "has no body", LOOP_HELP)) };
        let captured = captured(body);
        let of_carried: Vec<Place> = node.input.iter().skip(2).map(|name| self.place(name)).collect();
        if body.input.len() != node.input.len() || !(2..=body.output.len() + 1).contains(&node.input.len()) {
            return Err(refuse(node, "has a body with other inputs or outputs", LOOP_HELP));
        }
        let places: Vec<Place> =
            captured.iter().map(|name| self.place(name)).chain(of_carried.iter().copied()).collect();
        let layouts = layouts(&places);
        let Some(&steps) = layouts.first() else {
            // It may still turn as often as a step says.
            let turns = node.input.iter().take(2).map(|name| self.place(name));
            let all: Vec<Place> = places.iter().copied().chain(turns).collect();
            let place = without_steps(&all);
            if place != Place::Free {
                self.check_not_sized(node, captured.iter().chain(&node.input))?;
            }
            return Ok(vec![place; node.output.len()]);
        };
        let mut names = captured.iter().chain(node.input.iter().skip(2));
        if let Some(name) = names.find(|name| self.place(name) == Place::Last) {
            return Err(refuse(node, format!("takes '{name}' of the last step in each step"), LOOP_HELP));
        }
        self.found.reached += 1;
        // Turn i must read step i of each, or a later request would read other steps together.
        if layouts.iter().any(|other| (other.len, other.stride) != (steps.len, steps.stride)) {
            return Err(refuse(node, "reads steps of different times", LOOP_HELP));
        }
        let of = |shapes: &Shapes| shapes.inputs(node).split_off(2);
        let starts = of(self.short).into_iter().enumerate();
        let kinds: Vec<Carried> = starts.map(|(carried, start)| kind(body, carried, &start)).collect();
        self.check_turns(node, steps.len, kinds.contains(&Carried::State).then_some(index))?;
        let mut inner: HashMap<String, Place> = captured.iter().map(|name| (name.clone(), self.place(name))).collect();
        let name = |input: usize| body.input.get(input).map(|input| input.name().to_owned()).unwrap_or_default();
        inner.insert(name(0), Place::Counter { exact: true });
        inner.insert(name(1), Place::Counter { exact: false });
        for (carried, kind) in kinds.iter().enumerate() {
            inner.insert(name(carried + 2), kind.place(of_carried[carried], steps.stride));
        }
        let inferred = |shapes: &Shapes| {
            Shapes::infer(body, self.opset, body_inputs(body, None, &of(shapes), false), Some(shapes))
        };
        let [short, long, far] = [self.short, self.long, self.far].map(inferred);
        let mut tracker = Tracker::new(body, self.opset, (&short, &long, &far), inner);
        // One step of the body is not the last step of the request.
        tracker.in_body = true;
        tracker.sized = self.sized_inside(&captured);
        // What stays the same in each turn may still be the length of the input.
        let invariant = (0..kinds.len()).filter(|&carried| kinds[carried] == Carried::Invariant);
        tracker
            .sized
            .extend(invariant.filter(|carried| self.sized.contains(&node.input[carried + 2])).map(|of| name(of + 2)));
        tracker.run_inner()?;
        self.absorb(node, &tracker)?;
        let mut outputs = Vec::new();
        for (carried, &kind) in kinds.iter().enumerate() {
            let starts_sized = self.sized.contains(&node.input[carried + 2]);
            outputs.push(loop_output(node, body, &tracker, carried, (kind, of_carried[carried], starts_sized))?);
        }
        for output in &body.output[kinds.len() + 1..] {
            check_entry(node, tracker.place(output.name()), &[Place::Last, Place::Free])?;
            tracker.check_not_sized(node, [output.name()])?;
            outputs.push(Place::At(steps.stacked(0)));
        }
        let carried = (0..kinds.len()).filter(|&carried| kinds[carried] == Carried::State).collect();
        self.found.cuts.push(Cut::Loop { node: index, carried });
        Ok(outputs)
    }

    fn scan_node(&mut self, index: usize, node: &'a NodeProto) -> Result<Vec<Place>> {
        let Some(body) = node.graph("body") else { return Err(refuse(node, "has no body", LOOP_HELP)) };
        // A malformed node must not be followed by counts that its body does not have.
        let scanned = node.int("num_scan_inputs").unwrap_or(0);
        if body.input.len() != node.input.len() || !(1..=node.input.len() as i64).contains(&scanned) {
            return Err(refuse(node, "has a body with other inputs", LOOP_HELP));
        }
        let places: Vec<Place> = node.input.iter().map(|name| self.place(name)).collect();
        let outside = captured(body);
        if outside.iter().any(|name| matches!(self.place(name), Place::At(_))) {
            return Err(refuse(node, "reads the whole input in each step", LOOP_HELP));
        }
        let Some(&steps) = layouts(&places).first() else {
            let all: Vec<Place> = places.iter().copied().chain(outside.iter().map(|name| self.place(name))).collect();
            return Ok(vec![without_steps(&all); node.output.len()]);
        };
        self.found.reached += 1;
        if let Some(name) = outside.iter().find(|name| self.place(name) == Place::Last) {
            return Err(refuse(node, format!("takes '{name}' of the last step in each step"), LOOP_HELP));
        }
        // Before opset 9, a Scan has an axis of the batch and lengths, which are not followed.
        if self.opset < 9 {
            return Err(refuse(node, "is of an opset before 9", "convert the model to a newer opset"));
        }
        let (states, scanned) = scan_counts(node);
        let mut inner: HashMap<String, Place> = outside.iter().map(|name| (name.clone(), self.place(name))).collect();
        for (input, of_body) in body.input.iter().enumerate() {
            inner.insert(of_body.name().to_owned(), self.scan_input(node, input)?);
        }
        // All its states are states of the model already.
        let goes_on = states > 0 && node.input[..states].iter().all(|name| self.of_states.contains(name));
        if goes_on {
            self.found.goes_on = true;
        } else if states > 0 {
            self.found.recurrences.push(index);
        }
        let directions = scan_list(node, "scan_input_directions", scanned);
        let out_directions = scan_list(node, "scan_output_directions", body.output.len().saturating_sub(states));
        if directions.iter().chain(&out_directions).any(|&direction| direction != 0) {
            return Err(refuse(node, "scans backwards", "the answer to a step depends on later steps"));
        }
        let inferred = |shapes: &Shapes| {
            let (inputs, _) = scan_body_inputs(shapes, node, body);
            Shapes::infer(body, self.opset, inputs, Some(shapes))
        };
        let [short, long, far] = [self.short, self.long, self.far].map(inferred);
        let mut tracker = Tracker::new(body, self.opset, (&short, &long, &far), inner);
        tracker.in_body = true;
        tracker.sized = self.sized_inside(&outside);
        tracker.run_inner()?;
        self.absorb(node, &tracker)?;
        let out_axes = scan_list(node, "scan_output_axes", body.output.len().saturating_sub(states));
        let output = |(output, value): (usize, &ValueInfoProto)| {
            tracker.check_not_sized(node, [value.name()])?;
            if output < states {
                return Ok(Place::Last);
            }
            let rank = short.dims(value.name()).map_or(1, |dims| dims.len() + 1);
            let axis = axis_of(out_axes.get(output - states).copied().unwrap_or_default(), rank);
            axis.map(|axis| Place::At(steps.stacked(axis)))
                .map_err(|why| refuse(node, format!("stacks its output along {why}"), LOOP_HELP))
        };
        let outputs = body.output.iter().enumerate().map(output).collect::<Result<_, _>>()?;
        if !goes_on {
            self.found.cuts.push(Cut::Scan { node: index });
        }
        Ok(outputs)
    }

    fn if_node(&mut self, index: usize, node: &'a NodeProto) -> Result<Vec<Place>> {
        let names: Vec<String> = node.graphs().flat_map(captured).chain(node.input.iter().cloned()).collect();
        let places: Vec<Place> = names.iter().map(|name| self.place(name)).collect();
        if places.iter().all(|&place| place == Place::Free) {
            return Ok(vec![Place::Free; node.output.len()]);
        }
        if !places.iter().any(|place| matches!(place, Place::At(_) | Place::Counter { .. })) {
            self.check_not_sized(node, &names)?;
            return Ok(vec![Place::Last; node.output.len()]);
        }
        if node.input.is_empty() {
            return Err(refuse(node, "has no condition", CHECKER));
        }
        let taken = |shapes: &Shapes| branch(node, &shapes.get(&node.input[0]));
        let (Some(graph), Some(other)) = (taken(self.short), taken(self.long)) else {
            return Err(refuse(node, "takes a branch that depends on data", "export the model without the condition"));
        };
        // A model may branch at a length, as for inputs that are longer than its table of positions.
        let is_other_far = match taken(self.far) {
            Some(far) => !std::ptr::eq(graph, far),
            // It isn't followed through all loops.
            None => self.sized.contains(&node.input[0]),
        };
        if !std::ptr::eq(graph, other) || is_other_far {
            let why = "takes a branch that depends on the length of the input";
            return Err(refuse(node, why, "export the model without the condition"));
        }
        let inferred = |shapes: &Shapes| Shapes::infer(graph, self.opset, HashMap::new(), Some(shapes));
        let [short, long, far] = [self.short, self.long, self.far].map(inferred);
        let captured = captured(graph);
        let places = captured.iter().map(|name| (name.clone(), self.place(name))).collect();
        let mut tracker = Tracker::new(graph, self.opset, (&short, &long, &far), places);
        tracker.sized = self.sized_inside(&captured);
        tracker.in_body = self.in_body;
        let result = tracker.run_inner().and_then(|()| check_far(graph, &tracker.found, &far));
        if !tracker.found.recurrences.is_empty() {
            self.found.recurrences.push(index);
        }
        result?;
        // A state inside a branch would need an output that only one branch has.
        if !tracker.found.cuts.is_empty() {
            return Err(refuse(node, "has a recurrence in a branch", "export the model without the condition"));
        }
        self.take_over(&tracker);
        let sized = graph.output.iter().zip(&node.output).filter(|(value, _)| tracker.sized.contains(value.name()));
        self.sized.extend(sized.map(|(_, output)| output.clone()));
        Ok(graph.output.iter().map(|value| tracker.place(value.name())).collect())
    }

    /// Takes over what was found in a body. A body must have no cuts, because its nodes run once a step.
    fn absorb(&mut self, node: &NodeProto, inner: &Tracker) -> Result<()> {
        if !inner.found.cuts.is_empty() {
            return Err(refuse(node, "has a recurrence over the steps inside its body", LOOP_HELP));
        }
        self.take_over(inner);
        Ok(())
    }

    fn take_over(&mut self, inner: &Tracker) {
        self.found.quantized.extend(inner.found.quantized.iter().cloned());
        self.found.add_multiple(inner.found.multiple);
    }

    fn sized_inside(&self, captured: &[String]) -> HashSet<String> {
        captured.iter().filter(|name| self.sized.contains(*name)).cloned().collect()
    }
}

/// Refuses the first node that gives another number of steps for a long input than for short ones, such as a slice of
/// the first 100.
pub fn check_far(graph: &GraphProto, found: &Found, far: &Shapes) -> Result<()> {
    for node in &graph.node {
        for name in node.named_outputs() {
            let (Some(Place::At(layout)), Some(dims)) = (found.places.get(name), far.dims(name)) else { continue };
            // Padding is as long for a long input as for a short one.
            let padding = layout.lead + layout.trail;
            let wanted = ((layout.len - padding) * FAR_OVER_SHORT + padding) * layout.outer * layout.inner;
            if let Some(made) = dims.get(layout.axis).filter(|&&made| made != wanted) {
                let why = format!("limits the length of the input (it makes {made} of {wanted})");
                return Err(refuse(node, why, "export the model without this limit"));
            }
        }
    }
    Ok(())
}
