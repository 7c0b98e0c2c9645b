//! Random payloads, held against what a client can know.

use super::fuzzed::altered;
use super::*;

/// What a client knows of its sequence's sum.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Known {
    Dead,
    Sum(Row),
    Nothing,
}

/// Random payloads, over a few sequences, held against what a client can know.
pub struct Traffic {
    random: Random,
    /// Whether some requests are altered in any way.
    alters: bool,
    known: BTreeMap<u64, Known>,
    /// Ids that two live sequences may have had at once. An END may end only one of the two.
    mixed: Vec<u64>,
    pub held: Vec<Arc<Request>>,
    answers: usize,
}

/// A request of [`Traffic`], and whether nothing is wrong with it.
struct Chosen {
    request: Request,
    is_good: bool,
}

impl Traffic {
    fn new(seed: u64, ids: u64) -> Self {
        let known = (1..=ids).map(|id| (id, Known::Dead)).collect();
        let random = Random::new(seed);
        Self { random, alters: false, known, mixed: Vec::new(), held: Vec::new(), answers: 0 }
    }

    /// As a fuzzer's bytes choose, with requests that are altered in any way.
    pub fn of_bytes(random: Random, ids: u64) -> Self {
        Self { random, alters: true, ..Self::new(0, ids) }
    }

    pub fn is_over(&self) -> bool {
        self.random.is_used_up()
    }

    pub fn step(&mut self, model: &Loaded, faults: Option<u64>) {
        self.held.retain(|request| !request.is_released());
        let (mut payload, mut good) = (Vec::new(), Vec::new());
        let mut busy: Vec<u64> = self.held.iter().filter_map(|request| number(request)).collect();
        for _ in 0..=self.random.below(7) {
            let id = 1 + self.random.below(self.known.len() as u64);
            // Core sends the next request of a sequence when the last one is released.
            if !busy.contains(&id) {
                busy.push(id);
                let Chosen { request, is_good } = self.request(id);
                payload.push(request);
                good.push(is_good);
            }
        }
        if self.random.one_in(4) {
            payload.push(Request::new(Id::Number(0), 0, vec![], &[]));
            good.push(true);
        }
        let random = Random::new(self.random.below(u64::MAX));
        let faults = faults.map_or(Faults::None, |one_in| Faults::Random { random, one_in });
        let (payload, failed) = model.run_with(faults, payload);
        for (request, is_good) in payload.iter().zip(good) {
            self.learn(request, is_good, failed > 0);
        }
        self.held.extend(payload);
    }

    fn request(&mut self, id: u64) -> Chosen {
        let random = &mut self.random;
        let live = self.known[&id] != Known::Dead;
        let start = if live { random.one_in(40) } else { !random.one_in(10) };
        let flags = if start { START } else { 0 } | if random.one_in(6) { END } else { 0 };
        if random.one_in(8) {
            let wrong = wrong(id, flags);
            let chosen = random.below(wrong.len() as u64) as usize;
            return Chosen { request: wrong.into_iter().nth(chosen).unwrap().0, is_good: false };
        }
        let request = request(id, flags, [random.below(100) as f32, random.below(100) as f32]);
        if self.alters && random.one_in(4) {
            return Chosen { request: altered(random, request), is_good: false };
        }
        Chosen { request, is_good: true }
    }

    fn learn(&mut self, request: &Request, is_good: bool, faults: bool) {
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
            // A sequence that was started over soon ends with the new one.
            assert!(refused.is_none() || self.mixed.contains(&id), "sequence {id} was live: {refused:?}");
            assert!(sum.is_some() || !is_good || !is_certain, "nothing was wrong: {:?}", request.answer());
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
pub fn row_of(request: &Request) -> [u8; 8] {
    let value = request.inputs.iter().find(|input| input.name.as_bytes() == b"VALUE");
    value.and_then(|value| value.pieces.concat().try_into().ok()).unwrap_or_default()
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
    let (model, mut random) = (load(&triton, &direct()), Random::new(21));
    let mut lanes = Lanes::default();
    (0..300).for_each(|_| lanes.step(&model, &mut random, false));
    model.unload();
    triton.assert_clean();
}

/// What clients know of the lanes of the direct strategy. One sequence at a time has a lane; two lanes may have the
/// same id.
#[derive(Default)]
pub struct Lanes([Option<(u64, Row)>; 4]);

impl Lanes {
    /// Runs a random payload. If `alters`, some requests are altered in any way.
    pub fn step(&mut self, model: &Loaded, random: &mut Random, alters: bool) {
        let (mut asked, mut payload) = (Vec::new(), Vec::new());
        for lane in &self.0 {
            let row = [random.below(100) as f32, random.below(100) as f32];
            let end = if random.one_in(6) { END } else { 0 };
            if random.one_in(5) {
                asked.push(None);
                payload.push(Request::new(Id::Number(0), 0, vec![], &[]));
                continue;
            }
            let (id, before, start) = match lane {
                Some((id, sum)) if !random.one_in(10) => (*id, *sum, 0),
                _ => (1 + random.below(5), [0.0; 2], START),
            };
            let is_altered = alters && random.one_in(6);
            let request = request(id, start | end, row);
            payload.push(if is_altered { altered(random, request) } else { request });
            asked.push(Some((id, before, is_altered)));
        }
        for ((lane, asked), request) in self.0.iter_mut().zip(asked).zip(model.run(payload)) {
            let Some((id, before, is_altered)) = asked else { continue };
            let row = bytemuck::pod_read_unaligned::<Row>(&row_of(&request));
            let expected = [before[0] + row[0], before[1] + row[1]];
            let is_start = request.flags & START != 0;
            *lane = match sum(&request) {
                Some(sum) => {
                    assert_eq!(sum, expected, "sequence {id}");
                    Some((id, sum))
                }
                None => {
                    assert!(is_altered, "nothing was wrong: {:?}", request.answer());
                    (!is_start).then_some((id, before))
                }
            };
            lane.take_if(|_| request.flags & END != 0);
        }
    }
}
