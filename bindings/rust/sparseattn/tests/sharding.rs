// SPDX-License-Identifier: MIT
//! Ranks that hold one sequence together: threads, with channels for their bytes, attend as one device does. What is
//! refused.
mod common;
use common::{context, from_bf16, noise, to_bf16};
use sparseattn::*;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::mpsc::{channel, Receiver, Sender};

const SEQ: usize = 1200;
const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const DIM: usize = 8;

/// An element of the operands.
trait Number: Copy + Send + Sync {
    const DTYPE: Dtype;
    const BOUND: f32;
    fn of(x: f32) -> Self;
    fn value(self) -> f32;
    fn view<'a>(data: &'a [Self], shape: &[usize]) -> View<'a>;
    fn view_mut<'a>(data: &'a mut [Self], shape: &[usize]) -> ViewMut<'a>;
}

impl Number for f32 {
    const DTYPE: Dtype = Dtype::F32;
    const BOUND: f32 = 2e-5;
    fn of(x: f32) -> Self {
        x
    }
    fn value(self) -> f32 {
        self
    }
    fn view<'a>(data: &'a [Self], shape: &[usize]) -> View<'a> {
        View::new(data, shape).unwrap()
    }
    fn view_mut<'a>(data: &'a mut [Self], shape: &[usize]) -> ViewMut<'a> {
        ViewMut::new(data, shape).unwrap()
    }
}

/// Bits of bfloat16.
impl Number for u16 {
    const DTYPE: Dtype = Dtype::BF16;
    const BOUND: f32 = 3e-2;
    fn of(x: f32) -> Self {
        to_bf16(x)
    }
    fn value(self) -> f32 {
        from_bf16(self)
    }
    fn view<'a>(data: &'a [Self], shape: &[usize]) -> View<'a> {
        View::bf16(data, shape).unwrap()
    }
    fn view_mut<'a>(data: &'a mut [Self], shape: &[usize]) -> ViewMut<'a> {
        ViewMut::bf16(data, shape).unwrap()
    }
}

/// Attention of a whole sequence, and how its operands lie.
struct Case {
    pattern: Pattern,
    axes: Axes,
    value_in_key: bool,
    lists: Option<(Vec<i32>, usize)>, // [SEQ, HEADS_KV, most]
}

impl Case {
    fn of(pattern: Pattern) -> Self {
        Case { pattern, axes: Axes::Bshd, value_in_key: false, lists: None }
    }
    fn problem(&self, dtype: Dtype) -> Problem {
        let problem = Problem::new(1, HEADS, SEQ, DIM).heads_kv(HEADS_KV).dtype(dtype).axes(self.axes);
        problem.backward(true).value_in_key(self.value_in_key)
    }
    /// Rows lie alike in memory, with a batch of one or without.
    fn shape(&self, rows: &[usize]) -> Vec<usize> {
        let batch = if self.axes == Axes::Thd { &[][..] } else { &[1] };
        [batch, rows].concat()
    }
}

/// A pass forward and one backward over some queries.
struct Step<T> {
    q: Vec<T>,
    dout: Vec<T>,
    out: Vec<T>,
    dq: Vec<T>,
    lse: Vec<f32>, // [HEADS, queries]
}

/// Keys and values, or their gradients.
type Pair<T> = [Vec<T>; 2];

impl<T: Number> Step<T> {
    fn new(q: Vec<T>, dout: Vec<T>) -> Self {
        let (out, dq, lse) = (q.clone(), q.clone(), vec![0.0; q.len() / DIM]);
        Step { q, dout, out, dq, lse }
    }

    fn run(&mut self, case: &Case, plan: &Plan, lists: &[i32], [k, v]: &Pair<T>, [dk, dv]: &mut Pair<T>) {
        let (queries, keys) = (self.q.len() / HEADS / DIM, k.len() / HEADS_KV / DIM);
        let (shape, kv_shape) = (case.shape(&[queries, HEADS, DIM]), case.shape(&[keys, HEADS_KV, DIM]));
        let lse_shape = case.shape(&[HEADS, queries]);
        let most = case.lists.as_ref().map_or(0, |(_, most)| *most);
        let lists = (most > 0).then(|| View::new(lists, &case.shape(&[queries, HEADS_KV, most])).unwrap());
        let (q, k) = (T::view(&self.q, &shape), T::view(k, &kv_shape));
        let v = (!case.value_in_key).then(|| T::view(v, &kv_shape));
        let mut forward = plan.forward(q, k, v, T::view_mut(&mut self.out, &shape));
        if let Some(lists) = lists {
            forward = forward.indices(lists);
        }
        forward.lse(ViewMut::new(&mut self.lse, &lse_shape).unwrap()).run().unwrap();
        let (out, lse) = (T::view(&self.out, &shape), View::new(&self.lse, &lse_shape).unwrap());
        let dv = (!case.value_in_key).then(|| T::view_mut(dv, &kv_shape));
        let gradients = Gradients { dq: T::view_mut(&mut self.dq, &shape), dk: T::view_mut(dk, &kv_shape), dv };
        let mut backward = plan.backward(Saved { q, k, v, out, lse }, T::view(&self.dout, &shape), gradients);
        if let Some(lists) = lists {
            backward = backward.indices(lists);
        }
        backward.run().unwrap();
    }
}

/// Rows of the tokens of some ranges, `columns` elements each.
fn take<T: Copy>(all: &[T], ranges: &[Range<usize>], columns: usize) -> Vec<T> {
    ranges.iter().flat_map(|range| &all[range.start * columns..range.end * columns]).copied().collect()
}

/// Where the tokens of some ranges are among those that a plan takes. Each range lies in one of these.
fn places(held: &[Range<usize>], seen: &[Range<usize>]) -> Vec<Range<usize>> {
    let place = |held: &Range<usize>| {
        let before = seen.iter().filter(|range| range.end <= held.start).map(|range| range.len()).sum::<usize>();
        let range = seen.iter().find(|range| range.start <= held.start && held.end <= range.end);
        let begin = before + held.start - range.expect("a rank's own tokens are seen").start;
        begin..begin + held.len()
    };
    held.iter().map(place).collect()
}

fn demand_near<T: Number>(what: &str, got: &[T], wanted: &[T]) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let largest = wanted.iter().map(|x| x.value().abs()).fold(1.0, f32::max);
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let (got, wanted) = (got.value(), wanted.value());
        assert!((got - wanted).abs() <= T::BOUND * largest, "{what}[{i}] is {got}, of one device {wanted}");
    }
}

/// How one rank reaches the others: what it sends to each comes in order.
struct Post {
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
}

fn posts(ranks: usize) -> Vec<Post> {
    let mut posts: Vec<Post> = (0..ranks).map(|_| Post { to: vec![], from: vec![] }).collect();
    for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
        let (sender, receiver) = channel();
        posts[from].to.push(sender);
        posts[to].from.push(receiver);
    }
    posts
}

impl Post {
    /// From `sent` of each rank to `received` of the others, or back.
    fn carry(&self, sharding: &Sharding, from: &[u8], to: &mut [u8], is_back: bool) {
        for (rank, other) in self.to.iter().enumerate() {
            let peer = sharding.peer(rank).unwrap();
            other.send(from[if is_back { peer.back_received } else { peer.sent }].to_vec()).unwrap();
        }
        for (rank, other) in self.from.iter().enumerate() {
            let peer = sharding.peer(rank).unwrap();
            to[if is_back { peer.back_sent } else { peer.received }].copy_from_slice(&other.recv().unwrap());
        }
    }
}

/// The whole sequence on one device.
struct Whole<T> {
    keys: Pair<T>,
    gradients: Pair<T>,
    pass: Step<T>,
}

fn draw<T: Number>(rows: usize, seed: u32) -> Vec<T> {
    noise(SEQ * rows * DIM, seed).into_iter().map(T::of).collect()
}

impl<T: Number> Whole<T> {
    fn new(case: &Case) -> Self {
        let keys = [draw(HEADS_KV, 1), draw(HEADS_KV, 2)];
        let (mut gradients, mut pass) = (keys.clone(), Step::new(draw(HEADS, 3), draw(HEADS, 4)));
        let plan = context().plan(&case.pattern, &case.problem(T::DTYPE)).unwrap();
        let lists = case.lists.as_ref().map_or(&[][..], |(lists, _)| lists);
        pass.run(case, &plan, lists, &keys, &mut gradients);
        Whole { keys, gradients, pass }
    }
}

/// One rank's part: a step forward and back, then what came of it against one device.
fn run_rank<T: Number>(case: &Case, (ranks, rank): (usize, usize), split: &Split, post: &Post, truth: &Whole<T>) {
    let (context, problem) = (context(), case.problem(T::DTYPE));
    let sharding = Sharding::new(&context, &case.pattern, &problem, ranks, rank, split).unwrap();
    let (ranges, tokens, seen) = (sharding.ranges(rank).unwrap(), sharding.tokens(rank).unwrap(), sharding.seen());
    let (shape, seen_shape) = (case.shape(&[tokens, HEADS_KV, DIM]), case.shape(&[seen.tokens, HEADS_KV, DIM]));
    let own = places(&ranges, &seen.ranges);
    let has_values = !case.value_in_key;
    let view = |x, shape| T::view(x, shape);
    let value = |x, shape| has_values.then(|| T::view(x, shape));
    let (mut sent, mut received) =
        (Buffer::new(sharding.buffers().0).unwrap(), Buffer::new(sharding.buffers().1).unwrap());

    let [k, v] = [0, 1].map(|i: usize| take(&truth.keys[i], &ranges, HEADS_KV * DIM));
    let mut keys: Pair<T> = [(); 2].map(|()| vec![T::of(f32::NAN); seen.tokens * HEADS_KV * DIM]);
    let mut seen_gradients = keys.clone();
    let held = (view(&k, &shape), value(&v, &shape));
    sharding.pack(held, &mut sent).run().unwrap();
    post.carry(&sharding, &sent, &mut received, false);
    {
        let [k, v] = &mut keys;
        let seen = (T::view_mut(k, &seen_shape), has_values.then(|| T::view_mut(v, &seen_shape)));
        sharding.unpack(held, &received, seen).run().unwrap();
    }

    let [q, dout] = [&truth.pass.q, &truth.pass.dout].map(|x| take(x, &ranges, HEADS * DIM));
    let mut pass = Step::new(q, dout);
    let lists = case.lists.as_ref().map_or(vec![], |(lists, most)| take(lists, &ranges, HEADS_KV * most));
    pass.run(case, sharding.plan(), &lists, &keys, &mut seen_gradients);

    let (mut dk, mut dv) = (k.clone(), v.clone());
    let seen = (view(&seen_gradients[0], &seen_shape), value(&seen_gradients[1], &seen_shape));
    sharding.pack_gradients(seen, &mut received).run().unwrap();
    post.carry(&sharding, &received, &mut sent, true);
    let sums = (T::view_mut(&mut dk, &shape), has_values.then(|| T::view_mut(&mut dv, &shape)));
    sharding.add_gradients(seen, &sent, sums).run().unwrap();
    {
        let [dk, dv] = &mut seen_gradients;
        let seen = (T::view_mut(dk, &seen_shape), has_values.then(|| T::view_mut(dv, &seen_shape)));
        sharding.add_gradients_in_place(seen, &sent).run().unwrap();
    }
    let [in_place_dk, in_place_dv] = [0, 1].map(|i: usize| take(&seen_gradients[i], &own, HEADS_KV * DIM));

    let what = |name| format!("{name} of rank {rank} of {ranks}, {}, {split:?}", case.pattern);
    demand_near(&what("out"), &pass.out, &take(&truth.pass.out, &ranges, HEADS * DIM));
    demand_near(&what("dq"), &pass.dq, &take(&truth.pass.dq, &ranges, HEADS * DIM));
    demand_near(&what("dk"), &dk, &take(&truth.gradients[0], &ranges, HEADS_KV * DIM));
    demand_near(&what("dk in place"), &in_place_dk, &dk);
    if has_values {
        demand_near(&what("dv in place"), &in_place_dv, &dv);
        demand_near(&what("dv"), &dv, &take(&truth.gradients[1], &ranges, HEADS_KV * DIM));
    }
}

fn demand_as_one_device<T: Number>(case: &Case, ranks: usize, split: &Split) {
    let truth = Whole::<T>::new(case);
    std::thread::scope(|threads| {
        for (rank, post) in posts(ranks).into_iter().enumerate() {
            let truth = &truth;
            threads.spawn(move || run_rank(case, (ranks, rank), split, &post, truth));
        }
    });
}

fn splits() -> [(usize, Split); 3] {
    let ranges = vec![vec![900..1200, 0..200], vec![200..260, 400..900], vec![260..400]];
    [(4, Split::Contiguous), (2, Split::Zigzag), (3, Split::Ranges(ranges))]
}

fn cases() -> Vec<Case> {
    let local = causal() & (window(60, 0) | sink(3));
    let few = local.to_csr(SEQ, 0).unwrap();
    let csr = csr(&few.row_ptr, &few.columns.iter().map(|key| i64::from(*key)).collect::<Vec<_>>(), SEQ);
    // A key near by and one anywhere, for each query and head of keys.
    let lists: Vec<i32> = (0..SEQ * HEADS_KV).flat_map(|i| [(i / 2) as i32, (i * 37 % SEQ) as i32]).collect();
    let lists = Some((lists, 2));
    vec![
        Case::of(causal()),
        Case::of(local.clone()),
        Case { axes: Axes::Thd, ..Case::of(block_diagonal(100)) },
        Case { value_in_key: true, ..Case::of(local.clone()) },
        Case::of(csr),
        Case::of(per_head(&[local, full()], &[0, 1, 0, 0])),
        Case { lists: lists.clone(), ..Case::of(runtime_tokens(2)) },
        Case { lists, axes: Axes::Thd, ..Case::of(runtime_tokens(2) & causal()) },
    ]
}

#[test]
fn ranks_attend_as_one_device() {
    common::open();
    for case in &cases() {
        for (ranks, split) in &splits() {
            demand_as_one_device::<f32>(case, *ranks, split);
        }
    }
}

#[test]
fn ranks_attend_as_one_device_in_bfloat16() {
    common::open();
    for (case, (ranks, split)) in cases().iter().zip(splits().iter().cycle()) {
        demand_as_one_device::<u16>(case, *ranks, split);
    }
}

/// Two ranks, one after the other, whose rows of float8 have scales of their own: forward and back as one device does.
#[test]
fn ranks_bring_float8() {
    common::open();
    let elements = |seed| noise(SEQ * HEADS_KV * DIM, seed).into_iter().map(f32_to_f8).collect::<Vec<u8>>();
    let scales = |seed| noise(SEQ * HEADS_KV, seed).into_iter().map(|x| 1.0 + x / 2.0).collect::<Vec<f32>>();
    let pattern = causal() & (window(60, 0) | sink(3));
    let problem = Problem::new(1, HEADS_KV, SEQ, DIM).dtype(Dtype::F8_E4M3FN).backward(true);
    let operands = [elements(1), elements(2), elements(3)];
    let factors = [scales(4), scales(5), scales(6)];
    let dout: Vec<u16> = draw(HEADS_KV, 7);
    let whole = float8_step(&context().plan(&pattern, &problem).unwrap(), &operands, &factors, &dout);

    let shardings =
        [0, 1].map(|rank| Sharding::with_scales(&context(), &pattern, &problem, 2, rank, &Split::Zigzag).unwrap());
    let buffers = || {
        [0, 1].map(|i: usize| {
            let (sent, received) = shardings[i].buffers();
            [Buffer::new(sent).unwrap(), Buffer::new(received).unwrap()]
        })
    };
    let held = |i: usize, x: &[u8]| take(x, &shardings[i].ranges(i).unwrap(), HEADS_KV * DIM);
    let held_scales = |i: usize, x: &[f32]| take(x, &shardings[i].ranges(i).unwrap(), HEADS_KV);
    let (mut there, mut back) = (buffers(), buffers());
    let mine = [0, 1].map(|i| {
        let operands = [0, 1, 2].map(|n: usize| held(i, &operands[n]));
        (operands, [0, 1, 2].map(|n: usize| held_scales(i, &factors[n])))
    });
    for i in 0..2 {
        let ([_, k, v], [_, k_scales, v_scales]) = &mine[i];
        let shape = [1, SEQ / 2, HEADS_KV, DIM];
        let keys = (View::f8_e4m3fn(k, &shape).unwrap(), View::f8_e4m3fn(v, &shape).unwrap());
        let scales = (View::new(k_scales, &shape[..3]).unwrap(), View::new(v_scales, &shape[..3]).unwrap());
        demand(ErrorKind::Null, "k_scales", shardings[i].pack(keys, &mut there[i][0]).run());
        shardings[i].pack(keys, &mut there[i][0]).scales(scales).run().unwrap();
        let mut in_scope = Buffer::new(there[i][0].len()).unwrap();
        let plan = shardings[i].plan();
        plan.scope(&Host, |scope| scope.pack(&shardings[i], keys, &mut in_scope).scales(scales).run()).unwrap();
        assert_eq!(in_scope[..], there[i][0][..]);
        let peer = shardings[i].peer(1 - i).unwrap();
        assert_eq!(peer.sent.len(), peer.tokens_sent * 2 * HEADS_KV * (DIM + 4));
        assert_eq!(peer.back_sent.len(), peer.tokens_sent * 2 * HEADS_KV * DIM * 2);
    }
    let carry = |from: &[u8], from_range, to: &mut [u8], to_range: Range<usize>| {
        to[to_range].copy_from_slice(&from[from_range])
    };
    let mut gradients = vec![];
    for i in 0..2 {
        let (here, other) = (shardings[i].peer(1 - i).unwrap(), shardings[1 - i].peer(i).unwrap());
        let bytes = there[1 - i][0].to_vec();
        carry(&bytes, other.sent, &mut there[i][1], here.received.clone());
        let ([q, k, v], [q_scales, k_scales, v_scales]) = &mine[i];
        let (shape, seen_shape) = ([1, SEQ / 2, HEADS_KV, DIM], [1, shardings[i].seen().tokens, HEADS_KV, DIM]);
        let count = seen_shape[1] * HEADS_KV;
        let (mut seen, mut seen_scales) =
            ([(); 2].map(|()| vec![0x7f; count * DIM]), [(); 2].map(|()| vec![f32::NAN; count]));
        let keys = (View::f8_e4m3fn(k, &shape).unwrap(), View::f8_e4m3fn(v, &shape).unwrap());
        let scales = (View::new(k_scales, &shape[..3]).unwrap(), View::new(v_scales, &shape[..3]).unwrap());
        let ([seen_k, seen_v], [of_k, of_v]) = (&mut seen, &mut seen_scales);
        let places =
            (ViewMut::f8_e4m3fn(seen_k, &seen_shape).unwrap(), ViewMut::f8_e4m3fn(seen_v, &seen_shape).unwrap());
        let of_places = (ViewMut::new(of_k, &seen_shape[..3]).unwrap(), ViewMut::new(of_v, &seen_shape[..3]).unwrap());
        let received = &there[i][1];
        shardings[i]
            .plan()
            .scope(&Host, |scope| {
                scope.unpack(&shardings[i], keys, received, places).scales(scales).seen_scales(of_places).run()
            })
            .unwrap();
        let ([seen_k, seen_v], [of_k, of_v]) = (seen, seen_scales);
        let arriving = take(&dout, &shardings[i].ranges(i).unwrap(), HEADS_KV * DIM);
        let of_rank =
            float8_step(shardings[i].plan(), &[q.clone(), seen_k, seen_v], &[q_scales.clone(), of_k, of_v], &arriving);
        for (name, n) in [("out", 0), ("dq", 1)] {
            demand_near(name, &of_rank[n], &take(&whole[n], &shardings[i].ranges(i).unwrap(), HEADS_KV * DIM));
        }
        let pair = (View::bf16(&of_rank[2], &seen_shape).unwrap(), View::bf16(&of_rank[3], &seen_shape).unwrap());
        shardings[i].pack_gradients(pair, &mut back[i][1]).run().unwrap();
        gradients.push(of_rank);
    }
    for i in 0..2 {
        let (here, other) = (shardings[i].peer(1 - i).unwrap(), shardings[1 - i].peer(i).unwrap());
        let bytes = back[1 - i][1].to_vec();
        carry(&bytes, other.back_received, &mut back[i][0], here.back_sent.clone());
        let (shape, seen_shape) = ([1, SEQ / 2, HEADS_KV, DIM], [1, shardings[i].seen().tokens, HEADS_KV, DIM]);
        let (mut dk, mut dv) = (vec![0u16; SEQ / 2 * HEADS_KV * DIM], vec![0u16; SEQ / 2 * HEADS_KV * DIM]);
        let pair =
            (View::bf16(&gradients[i][2], &seen_shape).unwrap(), View::bf16(&gradients[i][3], &seen_shape).unwrap());
        let sums = (ViewMut::bf16(&mut dk, &shape).unwrap(), ViewMut::bf16(&mut dv, &shape).unwrap());
        shardings[i].add_gradients(pair, &back[i][0], sums).run().unwrap();
        for (name, got, n) in [("dk", dk, 2), ("dv", dv, 3)] {
            demand_near(name, &got, &take(&whole[n], &shardings[i].ranges(i).unwrap(), HEADS_KV * DIM));
        }
    }
}

/// Bits of a float8 near x, which is from -1 to 1.
fn f32_to_f8(x: f32) -> u8 {
    (x.abs() * 56.0) as u8 | if x < 0.0 { 0x80 } else { 0 }
}

/// Both passes: out, dq, dk, dv.
fn float8_step(plan: &Plan, operands: &[Vec<u8>; 3], scales: &[Vec<f32>; 3], dout: &[u16]) -> [Vec<u16>; 4] {
    let shapes = [0, 1, 2].map(|n: usize| [1, operands[n].len() / HEADS_KV / DIM, HEADS_KV, DIM]);
    let [q, k, v] = [0, 1, 2].map(|n: usize| View::f8_e4m3fn(&operands[n], &shapes[n]).unwrap());
    let [of_q, of_k, of_v] = [0, 1, 2].map(|n: usize| View::new(&scales[n], &shapes[n][..3]).unwrap());
    let [mut out, mut dq, mut dk, mut dv] = [0, 0, 1, 2].map(|n: usize| vec![0u16; operands[n].len()]);
    let mut lse = vec![0f32; scales[0].len()];
    let lse_shape = [1, HEADS_KV, shapes[0][1]];
    let forward = plan.forward(q, k, v, ViewMut::bf16(&mut out, &shapes[0]).unwrap());
    let forward = forward.lse(ViewMut::new(&mut lse, &lse_shape).unwrap());
    forward.q_scales(of_q).k_scales(of_k).v_scales(of_v).run().unwrap();
    let saved = Saved {
        q,
        k,
        v: Some(v),
        out: View::bf16(&out, &shapes[0]).unwrap(),
        lse: View::new(&lse, &lse_shape).unwrap(),
    };
    let gradients = Gradients {
        dq: ViewMut::bf16(&mut dq, &shapes[0]).unwrap(),
        dk: ViewMut::bf16(&mut dk, &shapes[1]).unwrap(),
        dv: Some(ViewMut::bf16(&mut dv, &shapes[2]).unwrap()),
    };
    let backward = plan.backward(saved, View::bf16(dout, &shapes[0]).unwrap(), gradients);
    backward.q_scales(of_q).k_scales(of_k).v_scales(of_v).run().unwrap();
    [out, dq, dk, dv]
}

fn of_causal(problem: &Problem, ranks: usize, rank: usize, split: &Split) -> Result<Sharding> {
    Sharding::new(&context(), &causal(), problem, ranks, rank, split)
}

#[test]
fn ranks_say_what_they_hold_and_exchange() {
    let problem = Problem::new(2, HEADS, 1024, DIM).heads_kv(HEADS_KV);
    for (split, wanted) in [(Split::Contiguous, [0, 256, 512, 768]), (Split::Zigzag, [768, 640, 512, 384])] {
        let mut pairs = 0.0;
        for (rank, wanted) in wanted.into_iter().enumerate() {
            let sharding = of_causal(&problem, 4, rank, &split).unwrap();
            let (mut sent, mut received, mut tokens) = (0, 0, 0);
            for other in 0..4 {
                let (peer, its) = (sharding.peer(other).unwrap(), of_causal(&problem, 4, other, &split).unwrap());
                let bytes = |tokens| tokens * 2 * HEADS_KV * 2 * DIM * 4;
                assert_eq!(peer.sent.len(), bytes(peer.tokens_sent));
                assert_eq!(peer.received.len(), bytes(peer.tokens_received));
                assert_eq!((peer.sent.start, peer.received.start), (sent, received));
                assert_eq!(its.peer(rank).unwrap().tokens_received, peer.tokens_sent);
                (sent, received, tokens) = (peer.sent.end, peer.received.end, tokens + peer.tokens_received);
            }
            assert_eq!((sharding.buffers(), tokens), ((sent, received), wanted));
            assert_eq!(sharding.peer(rank).unwrap().sent.len(), 0);
            assert_eq!(sharding.tokens(rank).unwrap(), 256);
            pairs += sharding.plan().stats().unwrap().pairs;
        }
        assert_eq!(pairs, (2 * HEADS) as f64 * causal().stats(1024).unwrap().pairs);
    }
    let split = Split::Ranges(vec![vec![700..1024, 0..300], vec![300..700]]);
    let sharding = of_causal(&problem, 2, 1, &split).unwrap();
    let clone = sharding.clone();
    drop(sharding);
    assert_eq!(clone.ranges(0).unwrap(), [700..1024, 0..300]);
    assert_eq!((clone.tokens(0).unwrap(), clone.tokens(1).unwrap()), (624, 400));
    assert_eq!(of_causal(&problem, 2, 0, &Split::Zigzag).unwrap().ranges(0).unwrap(), [0..256, 768..1024]);
    for rank in [2, usize::MAX] {
        for error in [clone.ranges(rank).unwrap_err(), clone.peer(rank).unwrap_err(), clone.tokens(rank).unwrap_err()] {
            assert_eq!((error.kind(), error.argument()), (ErrorKind::Range, "rank"), "{error}");
        }
    }
}

fn demand_seen(sharding: &Sharding, wanted: &[[usize; 2]]) {
    let seen = sharding.seen();
    let ranges: Vec<_> = seen.ranges.iter().map(|range| [range.start, range.end]).collect();
    assert_eq!(ranges, wanted);
    assert_eq!(seen.tokens, seen.ranges.iter().map(|range| range.len()).sum::<usize>());
}

#[test]
fn ranks_say_which_keys_their_plans_take() {
    let problem = Problem::new(1, 1, 4096, DIM);
    let of =
        |pattern: &Pattern, rank, split: &Split| Sharding::new(&context(), pattern, &problem, 8, rank, split).unwrap();
    // What a rank holds and the blocks of 128 tokens that it receives: before it, and the first.
    let local = causal() & (window(128, 0) | sink(4));
    demand_seen(&of(&local, 0, &Split::Contiguous), &[[0, 512]]);
    demand_seen(&of(&local, 5, &Split::Contiguous), &[[0, 128], [2432, 3072]]);
    demand_seen(&of(&window(0, 0), 1, &Split::Zigzag), &[[256, 512], [3584, 3840]]);
    demand_seen(&of(&full(), 5, &Split::Contiguous), &[[0, 4096]]);
    demand_seen(&of(&runtime_tokens(2), 5, &Split::Contiguous), &[[0, 4096]]);
    // Keys of all tokens are not those that the plan takes.
    let sharding = of(&local, 1, &Split::Contiguous);
    let (x, shape) = (vec![0f32; 4096 * DIM], [1, 4096, 1, DIM]);
    let all = View::new(&x, &shape).unwrap();
    let mut received = Buffer::new(sharding.buffers().1).unwrap();
    demand(ErrorKind::Shape, "seen_k", sharding.pack_gradients((all, all), &mut received).run());
}

fn demand<T>(kind: ErrorKind, argument: &str, result: Result<T>) {
    let error = result.err().unwrap_or_else(|| panic!("{argument}: no error"));
    assert_eq!((error.kind(), error.argument()), (kind, argument), "{error}");
}

#[test]
fn shardings_that_are_refused() {
    use ErrorKind::*;
    let problem = Problem::new(1, 2, 40, 4);
    let refused = |kind, argument, problem: Problem, ranks, rank, split: &Split| {
        demand(kind, argument, of_causal(&problem, ranks, rank, split));
    };
    for (ranks, rank, argument) in [
        (0, 0, "options.ranks"),
        (usize::MAX, 0, "options.ranks"),
        (2, 2, "options.rank"),
        (2, usize::MAX, "options.rank"),
        (41, 0, "problem.seq_q"),
    ] {
        refused(Range, argument, problem, ranks, rank, &Split::Contiguous);
    }
    refused(Range, "problem.seq_q", problem, 21, 0, &Split::Zigzag);
    refused(Range, "problem.seq_q", problem.seq_k(41), 2, 0, &Split::Zigzag);
    refused(Range, "problem.q_offset", problem.q_offset(1), 2, 0, &Split::Zigzag);
    refused(Unsupported, "problem.flags", problem.starts(true), 2, 0, &Split::Zigzag);
    #[allow(clippy::reversed_empty_ranges)] // that is what is refused
    let wrong = [
        vec![vec![0..20], vec![21..40]],
        vec![vec![0..20], vec![19..40]],
        vec![vec![0..20], vec![20..41]],
        vec![vec![0..20], vec![20..39]],
        vec![vec![0..20, 20..40], vec![]],
        vec![vec![0..20, 20..20], vec![20..40]],
        vec![vec![0..20], vec![40..20]],
        vec![vec![0..20], vec![20..usize::MAX]],
        vec![vec![0..40]],
        vec![vec![0..20], vec![20..40], vec![]],
        vec![vec![], vec![]],
        vec![],
    ];
    for ranges in wrong {
        refused(Range, "options.ranges", problem, 2, 0, &Split::Ranges(ranges));
    }
    let flags = Sharding::with_scales(&context(), &full(), &problem, 2, 0, &Split::Zigzag);
    demand(Range, "options.flags", flags);
    demand(Range, "left", Sharding::new(&context(), &window(-2, 0), &problem, 2, 0, &Split::Zigzag));
}

/// Work on the CPU is done when a call returns.
struct Host;

// SAFETY: NULL is legal, and nothing runs later.
unsafe impl Stream for Host {
    fn raw(&self) -> *mut c_void {
        std::ptr::null_mut()
    }
    fn wait(&self) -> std::result::Result<(), String> {
        Ok(())
    }
}

const HELD: [usize; 4] = [1, 20, 2, 4];
const ALL: [usize; 4] = [1, 40, 2, 4];

#[test]
fn exchanges_in_scopes_and_enqueued() {
    let problem = Problem::new(1, 2, 40, 4);
    let sharding = Sharding::new_on(&context(), &full(), &problem, 2, 1, &Split::Contiguous, &Host).unwrap();
    let (k, v, seen) = (noise(160, 1), noise(160, 2), noise(320, 3));
    let held = (View::new(&k, &HELD).unwrap(), View::new(&v, &HELD).unwrap());
    let gradients = (View::new(&seen, &ALL).unwrap(), View::new(&seen, &ALL).unwrap());
    let bytes: Vec<u8> = noise(320, 4).into_iter().flat_map(f32::to_ne_bytes).collect();
    let mut full_buffer = Buffer::new(bytes.len()).unwrap();
    full_buffer.copy_from_slice(&bytes);
    // Each way of starting, with all that is written.
    let all = [0, 1, 2].map(|way| {
        let (mut sent, mut received) = (Buffer::new(1280).unwrap(), Buffer::new(1280).unwrap());
        let mut written = [[(); 2].map(|()| vec![0f32; 160]), [(); 2].map(|()| vec![0f32; 320])].concat();
        let [dk, dv, seen_k, seen_v] = &mut written[..] else { unreachable!() };
        let view = |x, shape| ViewMut::new(x, shape).unwrap();
        let sums = (view(dk, &HELD), view(dv, &HELD));
        let places = (view(seen_k, &ALL), view(seen_v, &ALL));
        if way == 1 {
            sharding
                .plan()
                .scope(&Host, |scope| {
                    scope.pack(&sharding, held, &mut sent).run()?;
                    scope.unpack(&sharding, held, &full_buffer, places).run()?;
                    scope.pack_gradients(&sharding, gradients, &mut received).run()?;
                    scope.add_gradients(&sharding, gradients, &full_buffer, sums).run()
                })
                .unwrap();
        } else {
            let exchanges = [
                sharding.pack(held, &mut sent),
                sharding.unpack(held, &full_buffer, places),
                sharding.pack_gradients(gradients, &mut received),
                sharding.add_gradients(gradients, &full_buffer, sums),
            ];
            for exchange in exchanges {
                // SAFETY: a CPU ignores the stream, and is done when the call returns.
                let done = if way == 2 { unsafe { exchange.enqueue(Host.raw()) } } else { exchange.run() };
                done.unwrap();
            }
        }
        (sent.to_vec(), received.to_vec(), written)
    });
    assert_eq!((&all[0], &all[0]), (&all[1], &all[2]));
    let (sent, received, written) = &all[0];
    assert!(sent.iter().any(|x| *x != 0) && received.iter().any(|x| *x != 0));
    assert_eq!((&written[2][160..], &written[3][160..]), (&k[..], &v[..])); // its own are the last

    // Keys that are held may lie in their places already.
    let mut places = [written[2].clone(), written[3].clone()];
    places.iter_mut().for_each(|x| x[..160].fill(0.0));
    let [seen_k, seen_v] = &mut places;
    let seen = (ViewMut::new(seen_k, &ALL).unwrap(), ViewMut::new(seen_v, &ALL).unwrap());
    sharding.unpack_received(&full_buffer, seen).run().unwrap();
    assert_eq!(places[..], written[2..]);
    let [seen_k, seen_v] = &mut places;
    let seen = (ViewMut::new(seen_k, &ALL).unwrap(), ViewMut::new(seen_v, &ALL).unwrap());
    let exchange = sharding.plan().scope(&Host, |scope| scope.unpack_received(&sharding, &full_buffer, seen).run());
    exchange.unwrap();
    assert_eq!(places[..], written[2..]);
}

#[test]
fn exchanges_that_are_refused() {
    use ErrorKind::*;
    let sharding = Sharding::new(&context(), &full(), &Problem::new(1, 2, 40, 4), 2, 1, &Split::Contiguous).unwrap();
    let (x, far) = (vec![0f32; 320], 64 as *mut c_void);
    let (held, seen) = (View::new(&x[..160], &HELD).unwrap(), View::new(&x, &ALL).unwrap());
    let halves = View::f16(&[0; 160], &HELD).unwrap();
    // SAFETY: nobody reads or writes it: that is what is tested.
    let far_held = unsafe { View::from_raw(far, sparseattn::Dtype::F32, sparseattn::Device::Cuda(0), &HELD, None) };
    let far_held = far_held.unwrap();
    let far_bytes = || unsafe {
        ViewMut::from_raw(far, sparseattn::Dtype::U8, sparseattn::Device::Cuda(0), &[1280], None).unwrap()
    };
    let mut sent = Buffer::new(1296).unwrap();

    sharding.pack((held, held), &mut sent).run().unwrap(); // a longer one is legal
    demand(Shape, "k", sharding.pack((seen, held), &mut sent).run());
    demand(Shape, "v", sharding.pack((held, seen), &mut sent).run());
    demand(Dtype, "k", sharding.pack((halves, held), &mut sent).run());
    demand(Null, "v", sharding.pack((held, None), &mut sent).run());
    demand(Workspace, "buffer_bytes", sharding.pack((held, held), &mut sent[..1279]).run());
    demand(Workspace, "buffer_bytes", sharding.pack((held, held), &mut sent[..0]).run());
    demand(Layout, "buffer", sharding.pack((held, held), &mut sent[1..1281]).run());
    demand(Layout, "buffer", sharding.pack((held, held), ViewMut::strided(&mut sent, &[1280], &[0]).unwrap()).run());
    demand(Shape, "buffer", sharding.pack((held, held), ViewMut::new(&mut sent, &[81, 16]).unwrap()).run());
    let mut floats = vec![0f32; 1280];
    demand(Shape, "buffer", sharding.pack((held, held), &mut floats[..]).run());

    let mut places = [(); 2].map(|()| vec![0f32; 320]);
    let [k, v] = &mut places;
    let places = (ViewMut::new(k, &ALL).unwrap(), ViewMut::new(&mut v[..160], &HELD).unwrap());
    demand(Shape, "seen_v", sharding.unpack((held, held), &sent, places).run());
    demand(Shape, "seen_k", sharding.pack_gradients((held, seen), &mut sent).run());
    let mut sums = [(); 2].map(|()| vec![0f32; 160]);
    let [dk, dv] = &mut sums;
    let sums = (ViewMut::new(dk, &HELD).unwrap(), ViewMut::strided(&mut dv[..], &HELD, &[0, 0, 4, 1]).unwrap());
    demand(Layout, "v", sharding.add_gradients((seen, seen), &sent, sums).run());

    // Device memory wants a scope, and all memory lies in one place.
    demand(State, "buffer", sharding.pack((far_held, far_held), far_bytes()).run());
    let scoped = |held: (View, View), sent: ViewMut| {
        sharding.plan().scope(&Host, |scope| scope.pack(&sharding, held, sent).run())
    };
    demand(Device, "k", scoped((far_held, far_held), far_bytes()));
    demand(Device, "buffer", scoped((held, held), far_bytes()));
    demand(Device, "buffer", scoped((far_held, far_held), ViewMut::from(&mut sent)));
}

#[test]
fn nothing_goes_anywhere() {
    // Each sees its own: buffers are empty, and may lie anywhere.
    let (problem, shape) = (Problem::new(1, 1, 512, 4), [1, 256, 1, 4]);
    let sharding = Sharding::new(&context(), &block_diagonal(256), &problem, 2, 1, &Split::Contiguous).unwrap();
    assert_eq!((sharding.buffers(), sharding.peer(0).unwrap()), ((0, 0), Peer::default()));
    demand_seen(&sharding, &[[256, 512]]);
    let (x, mut places) = ([1f32; 1024], [[0f32; 1024]; 2]);
    let held = (View::new(&x, &shape).unwrap(), View::new(&x, &shape).unwrap());
    // SAFETY: there is no byte.
    let far = unsafe { ViewMut::from_raw(std::ptr::null_mut(), Dtype::U8, Device::Cuda(0), &[0], None).unwrap() };
    sharding.plan().scope(&Host, |scope| scope.pack(&sharding, held, far).run()).unwrap();
    sharding.pack(held, &mut Buffer::new(0).unwrap()).run().unwrap();
    let [k, v] = &mut places;
    let seen = (ViewMut::new(k, &shape).unwrap(), ViewMut::new(v, &shape).unwrap());
    sharding.unpack(held, &Buffer::new(0).unwrap(), seen).run().unwrap();
    assert_eq!(places, [x; 2]);
}
