//! Requests whose steps feed each other (`repeat`): each step adds the sum to itself, so it doubles.

use super::own::own;
use super::windows::decoupled;
use super::*;

/// The configuration, with the sum as the next value.
fn repeated(mut config: Value) -> Value {
    config["output"][0]["dims"] = json!([-1, 2]);
    fake_triton::with_parameters(config, &[("repeat", "<<<SUM, VALUE>>>"), ("repeat_until", "SUM=[64, 96]")])
}

fn schedulers() -> [Value; 4] {
    [repeated(oldest(8)), repeated(direct()), repeated(own(&[])), repeated(own(&[("worker_count", "2")]))]
}

fn request(id: u64, flags: u32, row: Row, most: i64) -> Request {
    super::request(id, flags, row).with_number("max_steps", most)
}

/// The sums after the steps of a request.
fn steps(sum: Row, row: Row, most: i64) -> Vec<Row> {
    let (mut sum, mut row, mut made) = (sum, row, Vec::new());
    while made.len() < most as usize
        && !made.last().is_some_and(|sum: &Row| sum.iter().any(|at| [64.0, 96.0].contains(at)))
    {
        sum = [sum[0] + row[0], sum[1] + row[1]];
        row = sum;
        made.push(sum);
    }
    made
}

/// The sums in all answers to a request; `None` for an error.
fn sums(request: &Request) -> Option<Vec<Row>> {
    let of_answer = |answer: &Answer| match answer {
        Answer::Outputs(outputs) => {
            Some(outputs["SUM"].1.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect::<Vec<Row>>())
        }
        Answer::End | Answer::Error(..) => None,
    };
    let sums: Option<Vec<_>> = request.parts().iter().chain(&request.answer()).map(of_answer).collect();
    sums.map(|sums| sums.concat())
}

#[test]
fn each_step_reads_what_the_one_before_gave() {
    let Some(triton) = Triton::start() else { return };
    for (seed, config) in (1..).zip(schedulers().into_iter().chain(schedulers().map(decoupled))) {
        let (model, mut random) = (load(&triton, &config), Random::new(seed));
        for round in 0..60 {
            let mut known = [[0.0, 0.0]; 4];
            for at_start in [true, false, false] {
                let asked: Vec<_> = (0..4)
                    .map(|_| {
                        let row = [random.below(9) as f32, random.below(9) as f32];
                        (row, 1 + random.below(7) as i64, !at_start && random.one_in(5))
                    })
                    .collect();
                let request = |(at, &(row, most, leaves)): (usize, &(Row, i64, bool))| {
                    let mut request = request(at as u64 + 1, if at_start { START } else { 0 }, row, most);
                    // Before the third step.
                    request.cancelled_after = leaves.then_some(2);
                    request
                };
                let payload = model.run(asked.iter().enumerate().map(request).collect());
                for (at, (request, &(row, most, leaves))) in payload.iter().zip(&asked).enumerate() {
                    let expected = steps(known[at], row, most);
                    if leaves && expected.len() > 2 {
                        let (_, text) = request.error().unwrap();
                        assert!(text.ends_with("(step 3 of the request)"), "{text}");
                    } else {
                        known[at] = *expected.last().unwrap();
                        assert_eq!(sums(request), Some(expected), "round {round}, sequence {}", at + 1);
                    }
                }
            }
            let ends = |id| super::request(id, END, [0.0, 0.0]).with_number("max_steps", 1);
            model.run((1..=4).map(ends).collect());
        }
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn whatever_fails_between_the_steps_each_request_is_answered_once_and_released_once() {
    let Some(triton) = Triton::start() else { return };
    for (seed, config) in (1..).zip(schedulers().into_iter().chain(schedulers().map(decoupled))) {
        run_with_faults(&triton, &config, seed, 100, |id, flags, random| {
            let mut request = request(id, flags, [random.below(9) as f32, 1.0], random.below(8) as i64);
            request.cancelled_after = random.one_in(10).then(|| random.below(6) as usize);
            request
        });
    }
    triton.assert_clean();
}
