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
