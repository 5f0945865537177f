// SPDX-License-Identifier: MIT
//! A GPU against the CPU, in memory of cudarc. Where there is no GPU, each test says so and passes.
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use half::bf16;
use sparseattn::*;
use sparseattn_cudarc::Stream;
use std::sync::Arc;

const SEQ: usize = 200;
const SHAPE: [usize; 4] = [1, SEQ, 4, 64];
const KV_SHAPE: [usize; 4] = [1, SEQ, 2, 64];
const LSE_SHAPE: [usize; 3] = [1, 4, SEQ];

fn gpu() -> Option<Arc<CudaStream>> {
    #[cfg(feature = "load")]
    {
        let path = std::env::var_os("SPARSEATTN_LIBRARY").map(std::path::PathBuf::from);
        // SAFETY: who runs the tests says which library.
        unsafe { load(path.as_deref()).unwrap() };
    }
    if device_count().unwrap() == 0 {
        eprintln!("SKIPPED: no NVIDIA GPU here, or no driver that the library can use");
        return None;
    }
    Some(CudaContext::new(0).unwrap().new_stream().unwrap())
}

fn problem() -> Problem {
    Problem::new(1, 4, SEQ, 64).heads_kv(2).backward(true)
}

fn local() -> Pattern {
    causal() & (window(31, 0) | sink(4))
}

fn noise(shape: &[usize], mut seed: u32) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
        (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..shape.iter().product()).map(|_| next()).collect()
}

struct Operands {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
}

fn operands() -> Operands {
    Operands { q: noise(&SHAPE, 1), k: noise(&KV_SHAPE, 2), v: noise(&KV_SHAPE, 3), dout: noise(&SHAPE, 4) }
}

/// out, lse, dq, dk, dv of the CPU.
fn expected(o: &Operands) -> [Vec<f32>; 5] {
    let plan = Context::cpu().unwrap().plan(&local(), &problem()).unwrap();
    let mut results = [&o.q[..], &[0.0; 4 * SEQ], &o.q, &o.k, &o.v].map(|like| vec![f32::NAN; like.len()]);
    let [out, lse, dq, dk, dv] = &mut results;
    let view = |data| View::new(data, &KV_SHAPE).unwrap();
    let (q, k, v) = (View::new(&o.q, &SHAPE).unwrap(), view(&o.k), view(&o.v));
    let (out_view, lse_view) = (ViewMut::new(out, &SHAPE).unwrap(), ViewMut::new(lse, &LSE_SHAPE).unwrap());
    plan.forward(q, k, v, out_view).lse(lse_view).run().unwrap();
    let (out, lse) = (View::new(out, &SHAPE).unwrap(), View::new(lse, &LSE_SHAPE).unwrap());
    let (dk, dv) = (ViewMut::new(dk, &KV_SHAPE).unwrap(), ViewMut::new(dv, &KV_SHAPE).unwrap());
    let gradients = Gradients { dq: ViewMut::new(dq, &SHAPE).unwrap(), dk, dv: Some(dv) };
    let dout = View::new(&o.dout, &SHAPE).unwrap();
    plan.backward(Saved { q, k, v: Some(v), out, lse }, dout, gradients).run().unwrap();
    results
}

fn demand_near(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= tolerance, "{what}[{i}] is {got}, expected {expected}");
    }
}

/// All of a buffer for reading or writing.
macro_rules! all {
    ($input:expr, $shape:expr) => {
        View::of(&$input, &$shape).unwrap()
    };
    (mut $output:expr, $shape:expr) => {
        ViewMut::of(&mut $output, &$shape).unwrap()
    };
}

#[test]
fn forward_and_backward_in_scopes() {
    let Some(gpu) = gpu() else { return };
    let o = operands();
    let stream = Stream::new(&gpu).unwrap();
    let plan = stream.context().unwrap().plan_on(&local(), &problem(), &stream).unwrap();
    let [q, k, v, dout] = [&o.q, &o.k, &o.v, &o.dout].map(|host| gpu.clone_htod(host).unwrap());
    let mut out: CudaSlice<f32> = gpu.alloc_zeros(q.len()).unwrap();
    let mut lse: CudaSlice<f32> = gpu.alloc_zeros(4 * SEQ).unwrap();
    let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|like| gpu.alloc_zeros::<f32>(like.len()).unwrap());
    let (q_in, k_in, v_in, dout_in) = (stream.input(&q), stream.input(&k), stream.input(&v), stream.input(&dout));
    let (q_view, k_view, v_view) = (all!(q_in, SHAPE), all!(k_in, KV_SHAPE), all!(v_in, KV_SHAPE));
    {
        let mut scratch = stream.workspace(&plan, Pass::Forward).unwrap();
        let bytes = [scratch.len()];
        let (mut out, mut lse) = (stream.output(&mut out), stream.output(&mut lse));
        let mut scratch = stream.output(&mut scratch);
        let (out, lse, scratch) = (all!(mut out, SHAPE), all!(mut lse, LSE_SHAPE), all!(mut scratch, bytes));
        plan.scope(&stream, |scope| scope.forward(q_view, k_view, v_view, out).lse(lse).workspace(scratch).run())
            .unwrap();
    }
    {
        let mut scratch = stream.workspace(&plan, Pass::Backward).unwrap();
        let bytes = [scratch.len()];
        let (out, lse) = (stream.input(&out), stream.input(&lse));
        let (mut dq, mut dk, mut dv) = (stream.output(&mut dq), stream.output(&mut dk), stream.output(&mut dv));
        let mut scratch = stream.output(&mut scratch);
        let saved = Saved { q: q_view, k: k_view, v: Some(v_view), out: all!(out, SHAPE), lse: all!(lse, LSE_SHAPE) };
        let gradients =
            Gradients { dq: all!(mut dq, SHAPE), dk: all!(mut dk, KV_SHAPE), dv: Some(all!(mut dv, KV_SHAPE)) };
        let (dout, scratch) = (all!(dout_in, SHAPE), all!(mut scratch, bytes));
        plan.scope(&stream, |scope| scope.backward(saved, dout, gradients).workspace(scratch).run()).unwrap();
    }
    let results = [("out", &out), ("lse", &lse), ("dq", &dq), ("dk", &dk), ("dv", &dv)];
    for ((name, got), expected) in results.into_iter().zip(expected(&o)) {
        demand_near(name, &gpu.clone_dtoh(got).unwrap(), &expected, 1e-4);
    }
}

#[test]
fn bfloat16_in_a_part_of_a_buffer() {
    let Some(gpu) = gpu() else { return };
    let o = operands();
    let stream = Stream::new(&gpu).unwrap();
    let plan = stream.context().unwrap().plan(&local(), &problem().backward(false).dtype(Dtype::BF16)).unwrap();
    let [q, k, v] = [&o.q, &o.k, &o.v].map(|host| {
        let numbers: Vec<bf16> = host.iter().map(|x| bf16::from_f32(*x)).collect();
        gpu.clone_htod(&numbers).unwrap()
    });
    let mut results: CudaSlice<bf16> = gpu.alloc_zeros(2 * q.len()).unwrap();
    {
        let mut second = results.slice_mut(q.len()..);
        let mut scratch = stream.workspace(&plan, Pass::Forward).unwrap();
        let bytes = [scratch.len()];
        let (q, k, v) = (stream.input(&q), stream.input(&k), stream.input(&v));
        let (mut out, mut scratch) = (stream.output(&mut second), stream.output(&mut scratch));
        let (q, k, v) = (all!(q, SHAPE), all!(k, KV_SHAPE), all!(v, KV_SHAPE));
        let (out, scratch) = (all!(mut out, SHAPE), all!(mut scratch, bytes));
        plan.scope(&stream, |scope| scope.forward(q, k, v, out).workspace(scratch).run()).unwrap();
    }
    let got: Vec<f32> = gpu.clone_dtoh(&results).unwrap().iter().map(|x| x.to_f32()).collect();
    assert!(got[..q.len()].iter().all(|x| *x == 0.0));
    demand_near("out", &got[q.len()..], &expected(&o)[0], 3e-2);
}

#[test]
fn a_pass_that_is_only_enqueued() {
    let Some(gpu) = gpu() else { return };
    let o = operands();
    let stream = Stream::new(&gpu).unwrap();
    let plan = stream.context().unwrap().plan(&local(), &problem().backward(false)).unwrap();
    let [q, k, v] = [&o.q, &o.k, &o.v].map(|host| gpu.clone_htod(host).unwrap());
    let mut result: CudaSlice<f32> = gpu.alloc_zeros(q.len()).unwrap();
    let mut memory = stream.workspace(&plan, Pass::Forward).unwrap();
    {
        let bytes = [memory.len()];
        let (q, k, v) = (stream.input(&q), stream.input(&k), stream.input(&v));
        let (mut out, mut scratch) = (stream.output(&mut result), stream.output(&mut memory));
        let out = all!(mut out, SHAPE);
        let pass = plan.forward(all!(q, SHAPE), all!(k, KV_SHAPE), all!(v, KV_SHAPE), out);
        // SAFETY: the buffers live until the copy below has waited for the stream.
        unsafe { pass.workspace(all!(mut scratch, bytes)).enqueue(gpu.cu_stream().cast()).unwrap() };
    }
    demand_near("out", &gpu.clone_dtoh(&result).unwrap(), &expected(&o)[0], 1e-4);
}

#[test]
fn lists_of_a_call() {
    // Every query lists the keys that the pattern keeps, so that both passes must be the pattern's.
    let Some(gpu) = gpu() else { return };
    let o = operands();
    let stream = Stream::new(&gpu).unwrap();
    let csr = local().to_csr(SEQ, 0).unwrap();
    let most = csr.row_ptr.windows(2).map(|row| (row[1] - row[0]) as usize).max().unwrap();
    let (mut indices, mut counts) = (vec![-1i32; SEQ * 2 * most], vec![0i32; SEQ * 2]);
    for list in 0..SEQ * 2 {
        let row = list / 2; // of two heads
        let keys = &csr.columns[csr.row_ptr[row] as usize..csr.row_ptr[row + 1] as usize];
        indices[list * most..][..keys.len()].copy_from_slice(keys);
        counts[list] = keys.len() as i32;
    }
    let plan = stream.context().unwrap().plan_on(&(causal() & runtime_tokens(most)), &problem(), &stream).unwrap();
    let [q, k, v, dout] = [&o.q, &o.k, &o.v, &o.dout].map(|host| gpu.clone_htod(host).unwrap());
    let (indices, counts) = (gpu.clone_htod(&indices).unwrap(), gpu.clone_htod(&counts).unwrap());
    let mut out: CudaSlice<f32> = gpu.alloc_zeros(q.len()).unwrap();
    let mut lse: CudaSlice<f32> = gpu.alloc_zeros(4 * SEQ).unwrap();
    let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|like| gpu.alloc_zeros::<f32>(like.len()).unwrap());
    let (q_in, k_in, v_in, dout_in) = (stream.input(&q), stream.input(&k), stream.input(&v), stream.input(&dout));
    let (q_view, k_view, v_view) = (all!(q_in, SHAPE), all!(k_in, KV_SHAPE), all!(v_in, KV_SHAPE));
    let (indices, counts) = (stream.input(&indices), stream.input(&counts));
    let (indices, counts) = (all!(indices, [1, SEQ, 2, most]), all!(counts, [1, SEQ, 2]));
    {
        let mut scratch = stream.workspace(&plan, Pass::Forward).unwrap();
        let bytes = [scratch.len()];
        let (mut out, mut lse) = (stream.output(&mut out), stream.output(&mut lse));
        let mut scratch = stream.output(&mut scratch);
        let (out, lse, scratch) = (all!(mut out, SHAPE), all!(mut lse, LSE_SHAPE), all!(mut scratch, bytes));
        plan.scope(&stream, |scope| {
            let pass = scope.forward(q_view, k_view, v_view, out).lse(lse).workspace(scratch);
            pass.indices(indices).index_counts(counts).run()
        })
        .unwrap();
    }
    {
        let mut scratch = stream.workspace(&plan, Pass::Backward).unwrap();
        let bytes = [scratch.len()];
        let (out, lse) = (stream.input(&out), stream.input(&lse));
        let (mut dq, mut dk, mut dv) = (stream.output(&mut dq), stream.output(&mut dk), stream.output(&mut dv));
        let mut scratch = stream.output(&mut scratch);
        let saved = Saved { q: q_view, k: k_view, v: Some(v_view), out: all!(out, SHAPE), lse: all!(lse, LSE_SHAPE) };
        let gradients =
            Gradients { dq: all!(mut dq, SHAPE), dk: all!(mut dk, KV_SHAPE), dv: Some(all!(mut dv, KV_SHAPE)) };
        let (dout, scratch) = (all!(dout_in, SHAPE), all!(mut scratch, bytes));
        plan.scope(&stream, |scope| {
            let pass = scope.backward(saved, dout, gradients).workspace(scratch);
            pass.indices(indices).index_counts(counts).run()
        })
        .unwrap();
    }
    let results = [("out", &out), ("lse", &lse), ("dq", &dq), ("dk", &dk), ("dv", &dv)];
    for ((name, got), expected) in results.into_iter().zip(expected(&o)) {
        demand_near(name, &gpu.clone_dtoh(got).unwrap(), &expected, 1e-4);
    }
}

const PAGE: usize = 16;
const PAGES: [usize; 4] = [16, PAGE, 2, 64];
const PAGE_TABLE: [i32; 13] = [7, 2, 15, 0, 9, 4, 11, 1, 14, 5, 3, 12, 8]; // as many as hold SEQ tokens

/// A prompt, then ten tokens at a time, come to a cache in pages that were never written. What their queries get.
fn decode(gpu: &Arc<CudaStream>, o: &Operands, float8: bool) -> Vec<f32> {
    let stream = Stream::new(gpu).unwrap();
    let context = stream.context().unwrap();
    let elements = PAGES.iter().product::<usize>();
    let nothing = vec![f32::NAN; elements];
    let (mut keys, mut values) = (gpu.clone_htod(&nothing).unwrap(), gpu.clone_htod(&nothing).unwrap());
    let nothing = vec![0x7fu8; elements]; // NaN
    let (mut keys8, mut values8) = (gpu.clone_htod(&nothing).unwrap(), gpu.clone_htod(&nothing).unwrap());
    let scales_shape = [PAGES[0], PAGES[1], PAGES[2]];
    let mut scales = [(); 2].map(|()| gpu.alloc_zeros::<f32>(elements / 64).unwrap());
    let table = gpu.clone_htod(&PAGE_TABLE).unwrap();
    let mut results = Vec::new();
    for (token, count) in std::iter::once((0, 150)).chain((150..SEQ).step_by(10).map(|token| (token, 10))) {
        let mut problem =
            Problem::new(1, 4, count, 64).heads_kv(2).seq_k(PAGE_TABLE.len() * PAGE).starts(true).page_size(PAGE);
        if float8 {
            problem = problem.cache_dtype(Dtype::F8_E4M3FN);
        }
        let plan = context.plan_on(&local(), &problem, &stream).unwrap();
        let rows = |host: &[f32], row: usize| gpu.clone_htod(&host[token * row..][..count * row]).unwrap();
        let (q, k_new, v_new) = (rows(&o.q, 256), rows(&o.k, 128), rows(&o.v, 128));
        let starts = gpu.clone_htod(&[token as i64]).unwrap();
        let (q, k_new, v_new) = (stream.input(&q), stream.input(&k_new), stream.input(&v_new));
        let (starts, table) = (stream.input(&starts), stream.input(&table));
        let (starts, table) = (all!(starts, [1]), all!(table, [1, PAGE_TABLE.len()]));
        let new = [1, count, 2, 64];
        {
            let [k_scales, v_scales] = &mut scales;
            let (mut k_scales, mut v_scales) = (stream.output(k_scales), stream.output(v_scales));
            let (mut k, mut v) = if float8 {
                (stream.output_f8_e4m3fn(&mut keys8), stream.output_f8_e4m3fn(&mut values8))
            } else {
                (stream.output(&mut keys), stream.output(&mut values))
            };
            let (new, cache) = ((all!(k_new, new), all!(v_new, new)), (all!(mut k, PAGES), all!(mut v, PAGES)));
            let scales = (all!(mut k_scales, scales_shape), all!(mut v_scales, scales_shape));
            plan.scope(&stream, |scope| {
                let append = scope.append(&context, &problem, new, cache, starts).page_table(table);
                if float8 {
                    append.choose_scales(scales.0, scales.1).run()
                } else {
                    append.run()
                }
            })
            .unwrap();
        }
        let mut out: CudaSlice<f32> = gpu.alloc_zeros(count * 256).unwrap();
        {
            let mut scratch = stream.workspace(&plan, Pass::Forward).unwrap();
            let bytes = [scratch.len()];
            let (mut out, mut scratch) = (stream.output(&mut out), stream.output(&mut scratch));
            let (k_scales, v_scales) = (stream.input(&scales[0]), stream.input(&scales[1]));
            let (k, v) = if float8 {
                (stream.input_f8_e4m3fn(&keys8), stream.input_f8_e4m3fn(&values8))
            } else {
                (stream.input(&keys), stream.input(&values))
            };
            let shape = [1, count, 4, 64];
            let (q, k, v, out) = (all!(q, shape), all!(k, PAGES), all!(v, PAGES), all!(mut out, shape));
            let scratch = all!(mut scratch, bytes);
            let (k_scales, v_scales) = (all!(k_scales, scales_shape), all!(v_scales, scales_shape));
            plan.scope(&stream, |scope| {
                let pass = scope.forward(q, k, v, out).starts(starts).page_table(table).workspace(scratch);
                if float8 {
                    pass.k_scales(k_scales).v_scales(v_scales).run()
                } else {
                    pass.run()
                }
            })
            .unwrap();
        }
        results.extend(gpu.clone_dtoh(&out).unwrap());
    }
    results
}

#[test]
fn a_cache_in_pages() {
    let Some(gpu) = gpu() else { return };
    let o = operands();
    let expected = &expected(&o)[0]; // of one pass over the whole sequence
    demand_near("out", &decode(&gpu, &o, false), expected, 1e-4);
    demand_near("out of float8", &decode(&gpu, &o, true), expected, 0.1);
}

#[test]
fn ranks_of_one_sequence() {
    // Two ranks, one after the other, on one GPU.
    let Some(gpu) = gpu() else { return };
    let o = operands();
    let stream = Stream::new(&gpu).unwrap();
    let context = stream.context().unwrap();
    let whole = problem().backward(false);
    let ranks = [0, 1].map(|rank| Sharding::new(&context, &local(), &whole, 2, rank, &Split::Contiguous).unwrap());
    let held = [0, 1].map(|rank| ranks[rank].ranges(rank).unwrap()[0].clone());
    let part = |host: &[f32], rank: usize, row: usize| {
        gpu.clone_htod(&host[held[rank].start * row..held[rank].end * row]).unwrap()
    };
    let sent = [0, 1].map(|rank| {
        let (k, v) = (part(&o.k, rank, 128), part(&o.v, rank, 128));
        let mut sent: CudaSlice<u8> = gpu.alloc_zeros(ranks[rank].buffers().0.max(1)).unwrap();
        {
            let (shape, bytes) = ([1, held[rank].len(), 2, 64], [sent.len()]);
            let (k, v, mut output) = (stream.input(&k), stream.input(&v), stream.output(&mut sent));
            let (k, v, output) = (all!(k, shape), all!(v, shape), all!(mut output, bytes));
            ranks[rank].plan().scope(&stream, |scope| scope.pack(&ranks[rank], (k, v), output).run()).unwrap();
        }
        sent
    });
    let mut results = Vec::new();
    for rank in 0..2 {
        let (sharding, other) = (&ranks[rank], 1 - rank);
        let mut received: CudaSlice<u8> = gpu.alloc_zeros(sharding.buffers().1.max(1)).unwrap();
        let (from, to) = (ranks[other].peer(rank).unwrap().sent, sharding.peer(other).unwrap().received);
        if !from.is_empty() {
            gpu.memcpy_dtod(&sent[other].slice(from), &mut received.slice_mut(to)).unwrap();
        }
        let seen = sharding.seen().tokens;
        let (q, k, v) = (part(&o.q, rank, 256), part(&o.k, rank, 128), part(&o.v, rank, 128));
        let [mut seen_k, mut seen_v] = [(); 2].map(|()| gpu.alloc_zeros::<f32>(seen * 128).unwrap());
        let mut out: CudaSlice<f32> = gpu.alloc_zeros(q.len()).unwrap();
        {
            let (k, v, received_in) = (stream.input(&k), stream.input(&v), stream.input(&received));
            let (mut seen_k, mut seen_v) = (stream.output(&mut seen_k), stream.output(&mut seen_v));
            let (shape, seen_shape, bytes) = ([1, held[rank].len(), 2, 64], [1, seen, 2, 64], [received.len()]);
            let (held, seen) =
                ((all!(k, shape), all!(v, shape)), (all!(mut seen_k, seen_shape), all!(mut seen_v, seen_shape)));
            let received = all!(received_in, bytes);
            sharding.plan().scope(&stream, |scope| scope.unpack(sharding, held, received, seen).run()).unwrap();
        }
        {
            let mut scratch = stream.workspace(sharding.plan(), Pass::Forward).unwrap();
            let bytes = [scratch.len()];
            let (q, k, v) = (stream.input(&q), stream.input(&seen_k), stream.input(&seen_v));
            let (mut out, mut scratch) = (stream.output(&mut out), stream.output(&mut scratch));
            let (shape, seen_shape) = ([1, held[rank].len(), 4, 64], [1, seen, 2, 64]);
            let (q, k, v) = (all!(q, shape), all!(k, seen_shape), all!(v, seen_shape));
            let (out, scratch) = (all!(mut out, shape), all!(mut scratch, bytes));
            sharding.plan().scope(&stream, |scope| scope.forward(q, k, v, out).workspace(scratch).run()).unwrap();
        }
        results.extend(gpu.clone_dtoh(&out).unwrap());
    }
    demand_near("out", &results, &expected(&o)[0], 1e-4);
}

#[test]
fn buffers_stay_on_the_stream_that_waited_for_them() {
    let Some(gpu) = gpu() else { return };
    let o = operands();
    let (stream, other) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu.context().new_stream().unwrap()).unwrap());
    let plan = stream.context().unwrap().plan(&local(), &problem().backward(false)).unwrap();
    let [q, k, v] = [&o.q, &o.k, &o.v].map(|host| gpu.clone_htod(host).unwrap());
    let mut result: CudaSlice<f32> = gpu.alloc_zeros(q.len()).unwrap();
    let mut memory = other.workspace(&plan, Pass::Forward).unwrap();
    let bytes = [memory.len()];
    let mut run = |with: &Stream, k_with: &Stream| {
        let (q, k, v) = (with.input(&q), k_with.input(&k), with.input(&v));
        let (mut out, mut scratch) = (with.output(&mut result), with.output(&mut memory));
        let (q, k, v) = (all!(q, SHAPE), all!(k, KV_SHAPE), all!(v, KV_SHAPE));
        let (out, scratch) = (all!(mut out, SHAPE), all!(mut scratch, bytes));
        plan.scope(&other, |scope| scope.forward(q, k, v, out).workspace(scratch).run())
    };
    let error = run(&other, &stream).unwrap_err();
    assert_eq!((error.kind(), error.argument()), (ErrorKind::State, "k"));
    run(&other, &other).unwrap();
    demand_near("out", &gpu.clone_dtoh(&result).unwrap(), &expected(&o)[0], 1e-4);
}

#[test]
fn wrong_places_are_errors() {
    let Some(gpu) = gpu() else { return };
    let o = operands();
    let stream = Stream::new(&gpu).unwrap();
    let plan = stream.context().unwrap().plan(&local(), &problem()).unwrap();
    let (q, k) = (gpu.clone_htod(&o.q).unwrap(), gpu.clone_htod(&o.k).unwrap());
    let (q, k) = (stream.input(&q), stream.input(&k));
    assert_eq!(View::of(&q, &KV_SHAPE).unwrap_err().kind(), ErrorKind::Shape);
    let (q, k) = (all!(q, SHAPE), all!(k, KV_SHAPE));
    let mut host = o.q.clone();
    let error = plan.forward(q, k, k, ViewMut::new(&mut host, &SHAPE).unwrap()).run().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::State); // nobody would wait
    let out = ViewMut::new(&mut host, &SHAPE).unwrap();
    let error = plan.scope(&stream, |scope| scope.forward(q, k, k, out).run()).unwrap_err();
    assert_eq!((error.kind(), error.argument()), (ErrorKind::Device, "out"));
}
