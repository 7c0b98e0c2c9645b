//! Payloads by chance, held against what a client can know.

use super::*;

/// What a client knows of its sequence's sum.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Known {
    Dead,
    Sum(Row),
    Nothing,
}

/// Payloads by chance, over a few sequences, held against what a client can know.
struct Traffic {
    random: Random,
    known: BTreeMap<u64, Known>,
    /// Ids that two live sequences may have had at once. An END may end only one of the two.
    mixed: Vec<u64>,
    held: Vec<Arc<Request>>,
    answers: usize,
}

impl Traffic {
    fn new(seed: u64, ids: u64) -> Self {
        let known = (1..=ids).map(|id| (id, Known::Dead)).collect();
        Self { random: Random(seed), known, mixed: Vec::new(), held: Vec::new(), answers: 0 }
    }

    fn step(&mut self, model: &Loaded, faults: Option<u64>) {
        self.held.retain(|request| !request.is_released());
        let mut payload = Vec::new();
        let mut busy: Vec<u64> = self.held.iter().filter_map(|request| number(request)).collect();
        for _ in 0..=self.random.below(7) {
            let id = 1 + self.random.below(self.known.len() as u64);
            // Core sends the next request of a sequence when the last one is released.
            if !busy.contains(&id) {
                busy.push(id);
                payload.push(self.request(id));
            }
        }
        if self.random.one_in(4) {
            payload.push(Request::new(Id::Number(0), 0, vec![], &[]));
        }
        let random = Random(self.random.below(u64::MAX));
        let faults = faults.map_or(Faults::None, |one_in| Faults::Random { random, one_in });
        let (payload, failed) = model.run_with(faults, payload);
        for request in &payload {
            self.learn(request, failed > 0);
        }
        self.held.extend(payload);
    }

    fn request(&mut self, id: u64) -> Request {
        let random = &mut self.random;
        let live = self.known[&id] != Known::Dead;
        let start = if live { random.one_in(40) } else { !random.one_in(10) };
        let flags = if start { START } else { 0 } | if random.one_in(6) { END } else { 0 };
        if random.one_in(8) {
            let wrong = wrong(id, flags);
            let chosen = random.below(wrong.len() as u64) as usize;
            return wrong.into_iter().nth(chosen).unwrap().0;
        }
        request(id, flags, [random.below(100) as f32, random.below(100) as f32])
    }

    fn learn(&mut self, request: &Request, faults: bool) {
        let Some(id) = number(request) else { return };
        let (start, end) = (request.flags & START != 0, request.flags & END != 0);
        let before = self.known[&id];
        if start && before != Known::Dead {
            self.mixed.push(id);
        }
        let (row, sum) = (bytemuck::pod_read_unaligned::<Row>(&row_of(request)), sum(request));
        let expected = match (start, before) {
            (true, _) => Some(row),
            (false, Known::Sum(sum)) => Some([sum[0] + row[0], sum[1] + row[1]]),
            (false, Known::Dead | Known::Nothing) => None,
        };
        let after = match (sum, expected) {
            (Some(sum), Some(expected)) => {
                assert_eq!(sum, expected, "sequence {id}, flags {}", request.flags);
                self.answers += 1;
                Known::Sum(sum)
            }
            (Some(_), None) if before == Known::Dead => panic!("sequence {id} was not live and has been continued"),
            // It may be the rest of a sequence that has been started over, which goes without notice.
            (Some(_), None) => Known::Nothing,
            (None, _) if request.answer().is_none() => Known::Nothing,
            (None, _) if !start => before,
            (None, _) if before == Known::Dead && !faults => Known::Dead,
            (None, _) => Known::Nothing,
        };
        let is_certain = !faults && !self.mixed.contains(&id);
        let after = match end {
            true if is_certain => Known::Dead,
            true => Known::Nothing,
            false => after,
        };
        if !faults && !start && matches!(before, Known::Sum(_)) {
            let refused = request.error().filter(|(code, _)| *code == TRITONSERVER_ERROR_NOT_FOUND);
            assert_eq!(refused, None, "sequence {id} was live");
        }
        self.known.insert(id, after);
    }
}

fn number(request: &Request) -> Option<u64> {
    match request.id {
        Id::Number(number) if number != 0 => Some(number),
        _ => None,
    }
}

/// The value that a request carries, as far as it is one.
fn row_of(request: &Request) -> [u8; 8] {
    let pieces = request.inputs.iter().find(|input| input.name.as_bytes() == b"VALUE").map(|input| &input.pieces);
    pieces.and_then(|pieces| pieces.first()?.as_slice().try_into().ok()).unwrap_or_default()
}

#[test]
fn traffic_by_chance_is_answered_rightly() {
    let Some(triton) = Triton::start() else { return };
    for seed in 0..4 {
        let model = load(&triton, &oldest(6));
        let mut traffic = Traffic::new(seed, 9);
        (0..400).for_each(|_| traffic.step(&model, None));
        wait_for_release(&traffic.held);
        assert!(traffic.answers > 300, "{}", traffic.answers);
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn traffic_by_chance_survives_failures_by_chance() {
    let Some(triton) = Triton::start() else { return };
    for (seed, one_in) in [(10, 200), (11, 50), (12, 20), (13, 7), (14, 2)] {
        let model = load(&triton, &oldest(6));
        let mut traffic = Traffic::new(seed, 9);
        (0..300).for_each(|_| traffic.step(&model, Some(one_in)));
        wait_for_release(&traffic.held);
        let (payload, _) = model.run_with(Faults::None, vec![request(100, START | END, [1.0, 2.0])]);
        assert!(sum(&payload[0]).is_some() || payload[0].error().unwrap().0 == TRITONSERVER_ERROR_UNAVAILABLE);
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn answers_that_take_long_leave_while_the_next_payload_runs_and_before_the_model_goes() {
    let Some(triton) = Triton::start() else { return };
    triton.slow_down(Duration::from_micros(300));
    let model = load(&triton, &oldest(30));
    let mut traffic = Traffic::new(30, 9);
    (0..60).for_each(|_| traffic.step(&model, None));
    wait_for_release(&traffic.held);
    assert!(traffic.answers > 30, "{}", traffic.answers);
    let payload = |ids: [u64; 3]| ids.map(|id| Arc::new(request(id, START, [id as f32, 1.0])));
    let (first, second) = (payload([100, 101, 102]), payload([103, 104, 105]));
    let began = Instant::now();
    model.instance.execute(&first).unwrap();
    model.instance.execute(&second).unwrap();
    let is_late = first.iter().chain(&second).any(|request| !request.is_released());
    // Six answers take 1.8 ms; where the machine was held up for longer, there is nothing to see.
    assert!(is_late || began.elapsed() > Duration::from_micros(1800), "Execute has waited for its answers");
    model.unload();
    for request in first.iter().chain(&second) {
        assert_eq!((sum(request).map(|sum| sum[1]), request.is_released()), (Some(1.0), true), "{:?}", request.id);
    }
    triton.assert_clean();
}

#[test]
fn lanes_of_the_direct_strategy_keep_their_sums_apart() {
    let Some(triton) = Triton::start() else { return };
    let (model, mut random) = (load(&triton, &direct()), Random(21));
    // One sequence at a time has a lane; two lanes may have the same id.
    let mut lanes: [Option<(u64, Row)>; 4] = [None; 4];
    for _ in 0..300 {
        let mut expected = Vec::new();
        let mut payload = Vec::new();
        for lane in &mut lanes {
            let row = [random.below(100) as f32, random.below(100) as f32];
            let end = random.one_in(6);
            let (id, sum, flags) = match lane {
                _ if random.one_in(5) => (0, None, 0),
                Some((id, sum)) if !random.one_in(10) => (*id, Some([sum[0] + row[0], sum[1] + row[1]]), 0),
                _ => (1 + random.below(5), Some(row), START),
            };
            match (id, sum) {
                (0, _) => payload.push(Request::new(Id::Number(0), 0, vec![], &[])),
                _ => payload.push(request(id, flags | if end { END } else { 0 }, row)),
            }
            if let Some(sum) = sum {
                *lane = (!end).then_some((id, sum));
            }
            expected.push(sum);
        }
        let sums = sums(&model.run(payload));
        assert_eq!(sums, expected);
    }
    model.unload();
    triton.assert_clean();
}
