// SPDX-License-Identifier: MIT
//! Plans and passes: dtypes, strides, scratch, lists of a call, packed sequences, caches, scopes, logs, threads.
mod common;
use common::{context, from_bf16, noise, to_bf16};
use sparseattn::*;
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{channel, Sender};

const SHAPE: [usize; 4] = [1, 50, 4, 16];
const KV_SHAPE: [usize; 4] = [1, 50, 2, 16];

fn problem() -> Problem {
    Problem::new(1, 4, 50, 16).heads_kv(2)
}

fn local() -> Pattern {
    causal() & (window(7, 0) | sink(2))
}

fn operands() -> (Vec<f32>, Vec<f32>) {
    (noise(50 * 4 * 16, 1), noise(50 * 2 * 16, 2))
}

fn forward(plan: &Plan, q: &[f32], kv: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; q.len()];
    let kv = View::new(kv, &KV_SHAPE).unwrap();
    plan.forward(View::new(q, &SHAPE).unwrap(), kv, kv, ViewMut::new(&mut out, &SHAPE).unwrap()).run().unwrap();
    out
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |most, x| if x <= most { most } else { x })
}

#[test]
fn plans_explain_and_count() {
    let plan = context().plan(&local(), &problem()).unwrap();
    assert!(plan.explain().unwrap().contains(&plan.kernel(Pass::Forward).unwrap()));
    assert_eq!(plan.kernel(Pass::Backward), None);
    assert_eq!(abi(), sys::SPATTN_ABI);
    assert!(plan.explain_all().unwrap().len() >= plan.explain().unwrap().len());
    assert_eq!(plan.to_string(), plan.explain().unwrap());
    assert_eq!(plan.stats().unwrap().pairs, 4.0 * local().stats(50).unwrap().pairs);
    assert!(plan.stats().unwrap().flops_forward > 0.0);
    let allowed = context().plan(&local(), &problem().tf32(true)).unwrap();
    assert!(allowed.explain().unwrap().contains("f32 or TF32"));
}

/// Structs that hold these derive Debug, and `unwrap_err` wants it of what a call would have made.
#[test]
fn what_programs_hold_shows_itself() {
    let options = ContextOptions::new().device(Device::Cpu).cpu_threads(3).log(LogLevel::Info, &|_, _| ());
    let options = format!("{options:?}");
    assert!(options.contains("Cpu") && options.contains('3') && options.contains("Some(Info)"), "{options}");
    let (context, (q, kv)) = (context(), operands());
    assert_eq!(context.plan(&local(), &problem().page_size(4)).unwrap_err().argument(), "problem.page_size");
    let plan = context.plan(&local(), &problem()).unwrap();
    let workspace = Workspace::new(&plan, Pass::Forward).unwrap();
    assert!(format!("{workspace:?}").contains(&plan.workspace(Pass::Forward).unwrap().0.to_string()));
    let (mut out, kv) = (vec![0f32; q.len()], View::new(&kv, &KV_SHAPE).unwrap());
    let pass = plan.forward(View::new(&q, &SHAPE).unwrap(), kv, kv, ViewMut::new(&mut out, &SHAPE).unwrap());
    assert!(format!("{pass:?}").contains(&plan.kernel(Pass::Forward).unwrap()));
    assert!(!format!("{context:?}").is_empty());
}

#[test]
fn every_element_type() {
    let (q, kv) = operands();
    let context = context();
    let expected = forward(&context.plan(&local(), &problem()).unwrap(), &q, &kv);

    let (q64, kv64): (Vec<f64>, Vec<f64>) =
        (q.iter().map(|x| *x as f64).collect(), kv.iter().map(|x| *x as f64).collect());
    let mut out64 = vec![0f64; q.len()];
    let plan = context.plan(&local(), &problem().dtype(Dtype::F64)).unwrap();
    let view = View::new(&kv64, &KV_SHAPE).unwrap();
    plan.forward(View::new(&q64, &SHAPE).unwrap(), view, view, ViewMut::new(&mut out64, &SHAPE).unwrap())
        .run()
        .unwrap();
    assert!(distance(&out64.iter().map(|x| *x as f32).collect::<Vec<_>>(), &expected) < 1e-5);

    let (q16, kv16): (Vec<u16>, Vec<u16>) =
        (q.iter().map(|x| to_bf16(*x)).collect(), kv.iter().map(|x| to_bf16(*x)).collect());
    let mut out16 = vec![0u16; q.len()];
    let plan = context.plan(&local(), &problem().dtype(Dtype::BF16)).unwrap();
    let view = View::bf16(&kv16, &KV_SHAPE).unwrap();
    plan.forward(View::bf16(&q16, &SHAPE).unwrap(), view, view, ViewMut::bf16(&mut out16, &SHAPE).unwrap())
        .run()
        .unwrap();
    assert!(distance(&out16.iter().map(|x| from_bf16(*x)).collect::<Vec<_>>(), &expected) < 3e-2);

    // 1.0 and 0.5 of float16: averages of equal values are that value.
    let (ones, halves) = (vec![0x3c00u16; q.len()], vec![0x3800u16; kv.len()]);
    let plan = context.plan(&local(), &problem().dtype(Dtype::F16)).unwrap();
    let view = View::f16(&halves, &KV_SHAPE).unwrap();
    plan.forward(View::f16(&ones, &SHAPE).unwrap(), view, view, ViewMut::f16(&mut out16, &SHAPE).unwrap())
        .run()
        .unwrap();
    assert!(out16.iter().all(|bits| *bits == 0x3800));
}

#[test]
fn strides() {
    let (q, kv) = operands();
    let plan = context().plan(&local(), &problem()).unwrap();
    let mut swapped = vec![0f32; kv.len()]; // [heads, seq, dim], read as [1, seq, heads, dim]
    for (i, x) in kv.iter().enumerate() {
        let (s, h, d) = (i / 32, i / 16 % 2, i % 16);
        swapped[(h * 50 + s) * 16 + d] = *x;
    }
    let view = View::strided(&swapped, &KV_SHAPE, &[0, 16, 800, 1]).unwrap();
    let mut out = vec![0f32; q.len()];
    plan.forward(View::new(&q, &SHAPE).unwrap(), view, view, ViewMut::new(&mut out, &SHAPE).unwrap()).run().unwrap();
    assert_eq!(out, forward(&plan, &q, &kv));
}

#[test]
fn own_scratch() {
    let (q, kv) = operands();
    let plan = context().plan(&local(), &problem()).unwrap();
    let mut workspace = Workspace::new(&plan, Pass::Forward).unwrap();
    let mut out = vec![0f32; q.len()];
    for _ in 0..2 {
        let kv = View::new(&kv, &KV_SHAPE).unwrap();
        let out = ViewMut::new(&mut out, &SHAPE).unwrap();
        plan.forward(View::new(&q, &SHAPE).unwrap(), kv, kv, out).workspace(workspace.view()).run().unwrap();
    }
    assert_eq!(out, forward(&plan, &q, &kv));
}

/// Runs a pass when it is dropped.
struct Last(Cell<Option<(Plan, Sender<Vec<f32>>)>>);

impl Drop for Last {
    fn drop(&mut self) {
        let (plan, sender) = self.0.take().unwrap();
        let (q, kv) = operands();
        sender.send(forward(&plan, &q, &kv)).unwrap();
    }
}

thread_local! {
    static LAST: Last = const { Last(Cell::new(None)) };
}

#[test]
fn a_pass_at_the_end_of_a_thread_has_scratch() {
    let (q, kv) = operands();
    let plan = context().plan(&local(), &problem()).unwrap();
    let (sender, receiver) = channel();
    let of_thread = plan.clone();
    let first = std::thread::spawn(move || {
        LAST.with(|last| last.0.set(Some((of_thread.clone(), sender)))); // older than the thread's scratch
        forward(&of_thread, &q, &kv)
    });
    assert_eq!(first.join().unwrap(), receiver.recv().unwrap());
}

#[test]
fn scratch_is_bytes_where_operands_lie() {
    // The library is told an address alone: what else is wrong is refused before, or safe code would write elsewhere.
    let (q, kv) = operands();
    let plan = context().plan(&local(), &problem()).unwrap();
    let (q_view, kv) = (View::new(&q, &SHAPE).unwrap(), View::new(&kv, &KV_SHAPE).unwrap());
    let (mut out, mut one, stream) = (q.clone(), [0u8], Counted(Cell::new(0)));
    let (bytes, align) = plan.workspace(Pass::Forward).unwrap();
    let repeated = ViewMut::strided(&mut one, &[bytes], &[0]).unwrap();
    let pass = plan.forward(q_view, kv, kv, ViewMut::new(&mut out, &SHAPE).unwrap());
    let error = pass.workspace(repeated).run().unwrap_err();
    assert_eq!((error.kind(), error.argument()), (ErrorKind::Layout, "workspace"));
    // SAFETY: nobody writes it: that is what is tested.
    let far = unsafe { ViewMut::from_raw(align as *mut c_void, Dtype::U8, Device::Cuda(0), &[bytes], None).unwrap() };
    let out = ViewMut::new(&mut out, &SHAPE).unwrap();
    let error = plan.scope(&stream, |scope| scope.forward(q_view, kv, kv, out).workspace(far).run()).unwrap_err();
    assert_eq!((error.kind(), error.argument()), (ErrorKind::Device, "workspace"));
}

#[test]
fn lists_of_a_run() {
    // Every query lists the keys that the pattern keeps, so that the answer must be the pattern's.
    let (q, kv) = operands();
    let context = context();
    let csr = local().to_csr(50, 0).unwrap();
    let (mut indices, mut counts) = (vec![-1i32; 50 * 2 * 50], vec![0i32; 50 * 2]);
    for row in 0..50 {
        let keys = &csr.columns[csr.row_ptr[row] as usize..csr.row_ptr[row + 1] as usize];
        for head in 0..2 {
            let list = (row * 2 + head) * 50;
            indices[list..list + keys.len()].copy_from_slice(keys);
            counts[row * 2 + head] = keys.len() as i32;
        }
    }
    let plan = context.plan(&runtime_tokens(50), &problem()).unwrap();
    let view = View::new(&kv, &KV_SHAPE).unwrap();
    let mut out = vec![0f32; q.len()];
    plan.forward(View::new(&q, &SHAPE).unwrap(), view, view, ViewMut::new(&mut out, &SHAPE).unwrap())
        .indices(View::new(&indices, &[1, 50, 2, 50]).unwrap())
        .index_counts(View::new(&counts, &[1, 50, 2]).unwrap())
        .run()
        .unwrap();
    assert!(distance(&out, &forward(&context.plan(&local(), &problem()).unwrap(), &q, &kv)) < 1e-5);
}

/// [`problem`] for calls of so many queries on a cache.
fn cache_problem(batch: usize, queries: usize) -> Problem {
    Problem::new(batch, 4, queries, 16).heads_kv(2).seq_k(50).starts(true)
}

#[test]
fn decoding() {
    // Token after token is a pass over the whole sequence, and what was not written yet may be NaN.
    let (q, kv) = operands();
    let context = context();
    let plan = context.plan(&local(), &cache_problem(1, 1)).unwrap();
    let (mut cache, mut out) = (vec![f32::NAN; kv.len()], vec![0f32; q.len()]);
    let shape = [1, 1, 4, 16];
    for token in 0..50 {
        cache[token * 32..][..32].copy_from_slice(&kv[token * 32..][..32]);
        let (starts, cache) = ([token as i32], View::new(&cache, &KV_SHAPE).unwrap());
        let out = ViewMut::new(&mut out[token * 64..][..64], &shape).unwrap();
        plan.forward(View::new(&q[token * 64..][..64], &shape).unwrap(), cache, cache, out)
            .starts(View::new(&starts, &[1]).unwrap())
            .run()
            .unwrap();
    }
    assert!(distance(&out, &forward(&context.plan(&local(), &problem()).unwrap(), &q, &kv)) < 1e-5);
}

#[test]
fn tokens_are_appended() {
    // A prompt, then token after token, on pages that were never written: rows of a pass over the whole sequence.
    let (q, kv) = operands();
    let context = context();
    let (mut keys, mut values, mut out) = (vec![f32::NAN; 6 * 320], vec![f32::NAN; 6 * 320], vec![0f32; q.len()]);
    let (table, shape) = ([4, 1, 5, 0, 3], [6, 10, 2, 16]);
    let table = View::new(&table, &[1, 5]).unwrap();
    for (token, count) in std::iter::once((0, 23)).chain((23..50).map(|token| (token, 1))) {
        let problem = cache_problem(1, count).page_size(10);
        let (starts, rows) = ([token as i64], View::new(&kv[token * 32..][..count * 32], &[1, count, 2, 16]).unwrap());
        let starts = View::new(&starts, &[1]).unwrap();
        let cache = (ViewMut::new(&mut keys, &shape).unwrap(), ViewMut::new(&mut values, &shape).unwrap());
        let stream = Counted(Cell::new(0));
        let plan = context.plan(&local(), &problem).unwrap();
        if count > 1 {
            context.append(&problem, (rows, rows), cache, starts).page_table(table).run().unwrap();
        } else {
            plan.scope(&stream, |scope| {
                scope.append(&context, &problem, (rows, rows), cache, starts).page_table(table).run()
            })
            .unwrap();
        }
        let (k, v) = (View::new(&keys, &shape).unwrap(), View::new(&values, &shape).unwrap());
        let out_shape = [1, count, 4, 16];
        let out = ViewMut::new(&mut out[token * 64..][..count * 64], &out_shape).unwrap();
        let q = View::new(&q[token * 64..][..count * 64], &out_shape).unwrap();
        plan.forward(q, k, v, out).starts(starts).page_table(table).run().unwrap();
    }
    assert!(distance(&out, &forward(&context.plan(&local(), &problem()).unwrap(), &q, &kv)) < 1e-5);
    assert!(keys[640..960].iter().chain(&values[640..960]).all(|x| x.is_nan()));
    // of a page that is nobody's
}

/// The number of these bits of float8_e4m3fn.
fn from_f8(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let size = if exponent > 0 { (8.0 + mantissa) * 2f32.powi(exponent - 10) } else { mantissa * 2f32.powi(-9) };
    if bits & 0x80 == 0 {
        size
    } else {
        -size
    }
}

#[test]
fn float8_caches() {
    // By scales that the call chooses for each row, and by one that the caller has for all; in a scope and outside.
    // What is read is what the elements stand for.
    let (q, kv) = operands();
    let context = context();
    let problem = cache_problem(1, 50).cache_dtype(Dtype::F8_E4M3FN);
    let (plan, whole) = (context.plan(&local(), &problem).unwrap(), context.plan(&local(), &self::problem()).unwrap());
    let (rows, starts) = (View::new(&kv, &KV_SHAPE).unwrap(), View::new(&[0], &[1]).unwrap());
    let one_for_all = [1.0 / 256.0f32];
    let one_for_all = View::strided(&one_for_all, &KV_SHAPE[..3], &[0, 0, 0]).unwrap();
    for (choose, scoped) in [(true, false), (true, true), (false, false), (false, true)] {
        let (mut keys, mut values) = (vec![0x7fu8; kv.len()], vec![0x7fu8; kv.len()]);
        let (mut k_scales, mut v_scales) = (vec![1.0 / 256.0f32; 100], vec![1.0 / 256.0f32; 100]);
        let cache =
            |keys, values| (ViewMut::f8_e4m3fn(keys, &KV_SHAPE).unwrap(), ViewMut::f8_e4m3fn(values, &KV_SHAPE).ok());
        let (cache, stream) = (cache(&mut keys, &mut values), Counted(Cell::new(0)));
        let (of_keys, of_values) = (
            ViewMut::new(&mut k_scales, &KV_SHAPE[..3]).unwrap(),
            ViewMut::new(&mut v_scales, &KV_SHAPE[..3]).unwrap(),
        );
        if scoped {
            plan.scope(&stream, |scope| {
                let append = scope.append(&context, &problem, (rows, rows), cache, starts);
                if choose {
                    append.choose_scales(of_keys, of_values).run()
                } else {
                    append.k_scales(one_for_all).v_scales(one_for_all).run()
                }
            })
            .unwrap();
        } else {
            let append = context.append(&problem, (rows, rows), cache, starts);
            let append = if choose {
                append.choose_scales(of_keys, of_values)
            } else {
                append.k_scales(one_for_all).v_scales(one_for_all)
            };
            append.run().unwrap();
        }
        assert_eq!((&keys, &k_scales), (&values, &v_scales));
        let stands_for: Vec<f32> = keys.iter().enumerate().map(|(i, bits)| k_scales[i / 16] * from_f8(*bits)).collect();
        for (i, (stands_for, x)) in stands_for.iter().zip(&kv).enumerate() {
            assert!((stands_for - x).abs() <= x.abs() / 16.0 + k_scales[i / 16] / 512.0);
        }
        let mut out = vec![f32::NAN; q.len()];
        let (k, v) = (View::f8_e4m3fn(&keys, &KV_SHAPE).unwrap(), View::f8_e4m3fn(&values, &KV_SHAPE).unwrap());
        let (q_view, out_view) = (View::new(&q, &SHAPE).unwrap(), ViewMut::new(&mut out, &SHAPE).unwrap());
        let scales = if choose { View::new(&k_scales, &KV_SHAPE[..3]).unwrap() } else { one_for_all };
        if scoped {
            plan.scope(&stream, |scope| {
                scope.forward(q_view, k, v, out_view).starts(starts).k_scales(scales).v_scales(scales).run()
            })
            .unwrap();
        } else {
            plan.forward(q_view, k, v, out_view).starts(starts).k_scales(scales).v_scales(scales).run().unwrap();
        }
        assert!(distance(&out, &forward(&whole, &q, &stands_for)) < 1e-5);
    }
}

/// What both passes write, lse, out, dq, dk and dv, of operands that may have scales. What was not written is NaN,
/// which nothing equals.
fn both_passes(plan: &Plan, [q, k, v]: [View; 3], scales: Option<[View; 3]>, scoped: bool) -> [Vec<f32>; 5] {
    macro_rules! run_with_scales {
        ($call:expr) => {
            match scales {
                Some([q_scales, k_scales, v_scales]) => {
                    $call.q_scales(q_scales).k_scales(k_scales).v_scales(v_scales).run()
                }
                None => $call.run(),
            }
        };
    }
    let halves = |shape: &[usize; 4]| vec![0x7fffu16; shape.iter().product()];
    let (mut out, mut dq, mut dk, mut dv) = (halves(&SHAPE), halves(&SHAPE), halves(&KV_SHAPE), halves(&KV_SHAPE));
    let (mut lse, stream) = (vec![f32::NAN; 4 * 50], Counted(Cell::new(0)));
    let written = (ViewMut::bf16(&mut out, &SHAPE).unwrap(), ViewMut::new(&mut lse, &[1, 4, 50]).unwrap());
    if scoped {
        plan.scope(&stream, |scope| run_with_scales!(scope.forward(q, k, v, written.0).lse(written.1))).unwrap();
    } else {
        run_with_scales!(plan.forward(q, k, v, written.0).lse(written.1)).unwrap();
    }
    let dout: Vec<u16> = noise(out.len(), 8).into_iter().map(to_bf16).collect();
    let saved =
        Saved { q, k, v: Some(v), out: View::bf16(&out, &SHAPE).unwrap(), lse: View::new(&lse, &[1, 4, 50]).unwrap() };
    let (dout, gradients) = (
        View::bf16(&dout, &SHAPE).unwrap(),
        Gradients {
            dq: ViewMut::bf16(&mut dq, &SHAPE).unwrap(),
            dk: ViewMut::bf16(&mut dk, &KV_SHAPE).unwrap(),
            dv: ViewMut::bf16(&mut dv, &KV_SHAPE).ok(),
        },
    );
    if scoped {
        plan.scope(&stream, |scope| run_with_scales!(scope.backward(saved, dout, gradients))).unwrap();
    } else {
        run_with_scales!(plan.backward(saved, dout, gradients)).unwrap();
    }
    let floats = |bits: Vec<u16>| bits.into_iter().map(from_bf16).collect();
    [lse, floats(out), floats(dq), floats(dk), floats(dv)]
}

#[test]
fn float8_operands() {
    // Each row has a scale of its own, or a call has none; in a scope and outside. Scales that are powers of 2 leave
    // numbers that bf16 has, so that results are those of a bf16 call on them.
    let context = context();
    let plan_of = |dtype| context.plan(&local(), &problem().dtype(dtype).backward(true)).unwrap();
    let (plan, plan_of_bf16) = (plan_of(Dtype::F8_E4M3FN), plan_of(Dtype::BF16));
    for (with_scales, scoped) in [(true, false), (true, true), (false, false), (false, true)] {
        let draw = |heads: usize, seed| {
            let scales: Vec<f32> =
                (0..50 * heads).map(|row| if with_scales { [0.5, 1.0, 2.0][row % 3] } else { 1.0 }).collect();
            let bits: Vec<u8> =
                noise(50 * heads * 16, seed).into_iter().map(|x| ((x + 1.0) * 127.0) as u8 & 0xbf).collect();
            let numbers: Vec<u16> =
                bits.iter().enumerate().map(|(i, bits)| to_bf16(scales[i / 16] * from_f8(*bits))).collect();
            (bits, scales, numbers)
        };
        let drawn = [(draw(4, 5), SHAPE), (draw(2, 6), KV_SHAPE), (draw(2, 7), KV_SHAPE)];
        let elements = [0, 1, 2].map(|i| View::f8_e4m3fn(&drawn[i].0 .0, &drawn[i].1).unwrap());
        let scales = [0, 1, 2].map(|i| View::new(&drawn[i].0 .1, &drawn[i].1[..3]).unwrap());
        let numbers = [0, 1, 2].map(|i| View::bf16(&drawn[i].0 .2, &drawn[i].1).unwrap());
        let made = both_passes(&plan, elements, with_scales.then_some(scales), scoped);
        assert_eq!(made, both_passes(&plan_of_bf16, numbers, None, false));
    }
}

#[test]
fn chunks_and_shared_pages() {
    // Two entries ask of one sequence, whose pages lie in some order among others, and each from a place of its own.
    let (q, kv) = operands();
    let context = context();
    let plan = context.plan(&local(), &cache_problem(2, 20).page_size(10)).unwrap();
    let (table, starts) = ([4i64, 1, 6, 0, 3, 4, 1, 6, 0, 3], [30i64, 40]);
    let mut pages = vec![f32::NAN; 7 * 320];
    for (page, tokens) in table.iter().zip(kv.chunks(320)) {
        pages[*page as usize * 320..][..320].copy_from_slice(tokens);
    }
    let chunks: Vec<f32> =
        starts.iter().flat_map(|start| q.iter().cycle().skip(*start as usize * 64).take(1280)).copied().collect();
    let (mut out, mut scoped, mut lse) = (vec![0f32; 2560], vec![0f32; 2560], vec![0f32; 160]);
    let (shape, pages) = ([2, 20, 4, 16], View::new(&pages, &[7, 10, 2, 16]).unwrap());
    let (q_view, starts, table) =
        (View::new(&chunks, &shape).unwrap(), View::new(&starts, &[2]).unwrap(), View::new(&table, &[2, 5]).unwrap());
    plan.forward(q_view, pages, pages, ViewMut::new(&mut out, &shape).unwrap())
        .lse(ViewMut::new(&mut lse, &[2, 4, 20]).unwrap())
        .starts(starts)
        .page_table(table)
        .run()
        .unwrap();

    let mut expected = forward(&context.plan(&local(), &problem()).unwrap(), &q, &kv);
    expected.extend_from_within(40 * 64..);
    expected.resize(30 * 64 + out.len(), 0.0); // the second entry has 10 tokens to ask for, and then none
    assert!(distance(&out, &expected[30 * 64..]) < 1e-5);
    assert!(lse.iter().enumerate().all(|(i, lse)| lse.is_finite() == (i < 80 || i % 20 < 10)));

    let (stream, out_view) = (Counted(Cell::new(0)), ViewMut::new(&mut scoped, &shape).unwrap());
    plan.scope(&stream, |scope| scope.forward(q_view, pages, pages, out_view).starts(starts).page_table(table).run())
        .unwrap();
    assert_eq!(out, scoped);
}

/// [`cache_problem`] for calls of so many queries of two entries together, in pages of 10 tokens.
fn ragged_problem(queries: usize) -> Problem {
    cache_problem(2, queries).axes(Axes::Thd).page_size(10)
}

#[test]
fn queries_of_several_sequences() {
    // A chunk of a prompt lies beside what another sequence decodes, each on pages of its own: rows of what each would
    // give alone. One plan serves any numbers of queries, and rows that are nobody's see nothing.
    let (q, kv) = operands();
    let context = context();
    let (plan, alone) =
        (context.plan(&local(), &ragged_problem(24)).unwrap(), context.plan(&local(), &problem()).unwrap());
    let keys = [kv, noise(50 * 2 * 16, 3)];
    let whole = [forward(&alone, &q, &keys[0]), forward(&alone, &q, &keys[1])];
    let (table, starts) = ([4i32, 1, 6, 0, 3, 7, 2, 9, 5, 8], [26i64, 3]);
    let mut pages = vec![0f32; 10 * 320];
    for (page, tokens) in table.iter().zip(keys.iter().flat_map(|keys| keys.chunks(320))) {
        pages[*page as usize * 320..][..320].copy_from_slice(tokens);
    }
    let (shape, pages) = ([24, 4, 16], View::new(&pages, &[10, 10, 2, 16]).unwrap());
    let (starts_view, table) = (View::new(&starts, &[2]).unwrap(), View::new(&table, &[2, 5]).unwrap());
    for offsets in [[0, 1, 24], [1, 2, 21], [2, 20, 20], [0, 0, 24], [5, 5, 5]] {
        let (mut queries, mut expected) = (vec![f32::NAN; 24 * 64], vec![0f32; 24 * 64]);
        for entry in 0..2 {
            let (at, from) = (offsets[entry] as usize * 64, starts[entry] as usize * 64);
            let count = offsets[entry + 1] as usize * 64 - at;
            queries[at..][..count].copy_from_slice(&q[from..][..count]);
            expected[at..][..count].copy_from_slice(&whole[entry][from..][..count]);
        }
        let (mut out, mut scoped, mut lse) = (vec![f32::NAN; 24 * 64], vec![f32::NAN; 24 * 64], vec![0f32; 96]);
        let (q_view, offsets_view) = (View::new(&queries, &shape).unwrap(), View::new(&offsets, &[3]).unwrap());
        plan.forward(q_view, pages, pages, ViewMut::new(&mut out, &shape).unwrap())
            .lse(ViewMut::new(&mut lse, &[4, 24]).unwrap())
            .starts(starts_view)
            .page_table(table)
            .query_offsets(offsets_view)
            .run()
            .unwrap();
        assert!(distance(&out, &expected) < 1e-5, "{offsets:?}");
        let asked = offsets[0]..offsets[2];
        assert!(lse.iter().enumerate().all(|(i, lse)| lse.is_finite() == asked.contains(&(i as i64 % 24))));

        let (stream, out_view) = (Counted(Cell::new(0)), ViewMut::new(&mut scoped, &shape).unwrap());
        plan.scope(&stream, |scope| {
            let pass = scope.forward(q_view, pages, pages, out_view).starts(starts_view).page_table(table);
            pass.query_offsets(offsets_view).run()
        })
        .unwrap();
        assert_eq!(out, scoped);
    }
}

#[test]
fn query_offsets_may_be_any_numbers() {
    // What comes of offsets that fall or lie outside means nothing, but no row of others is touched.
    let (q, kv) = operands();
    let plan = context().plan(&local(), &ragged_problem(50)).unwrap();
    let pages = View::new(&kv, &[5, 10, 2, 16]).unwrap();
    let numbers = [i64::MIN, -1, 0, 7, 50, 51, i64::MAX];
    let mut memory = vec![f32::NAN; q.len() + 128];
    for first in numbers {
        for second in numbers {
            for third in numbers {
                let (starts, table, offsets) = ([40i64, 11], [0i32, 1, 2, 3, 4, 4, 3, 2, 1, 0], [first, second, third]);
                let out = ViewMut::new(&mut memory[64..][..q.len()], &SHAPE[1..]).unwrap();
                plan.forward(View::new(&q, &SHAPE[1..]).unwrap(), pages, pages, out)
                    .starts(View::new(&starts, &[2]).unwrap())
                    .page_table(View::new(&table, &[2, 5]).unwrap())
                    .query_offsets(View::new(&offsets, &[3]).unwrap())
                    .run()
                    .unwrap();
            }
        }
    }
    assert!(memory[..64].iter().chain(&memory[64 + q.len()..]).all(|x| x.is_nan()));
}

#[test]
fn nodes_of_trees() {
    // Each node gets what a query gets that comes alone behind the tokens before its tree and its ancestors. Entries
    // have as many nodes each, or as the call says; in a scope and outside.
    let (q, kv) = operands();
    let context = context();
    let keys = [kv, noise(50 * 2 * 16, 3)];
    let (table, starts, offsets) = ([4i32, 1, 6, 0, 3, 7, 2, 9, 5, 8], [31i64, 8], [0, 7, 14]);
    let parents = [-1, 0, 0, 1, 1, -1, 5, -1, -1, -1, 2, 3, 1, 4]; // of one entry, and the other
    let mut pages = vec![0f32; 10 * 320];
    for (page, tokens) in table.iter().zip(keys.iter().flat_map(|keys| keys.chunks(320))) {
        pages[*page as usize * 320..][..320].copy_from_slice(tokens);
    }
    let mut expected = vec![0f32; 14 * 64];
    for (row, out) in expected.chunks_mut(64).enumerate() {
        let (text, own) = keys[row / 7].split_at(starts[row / 7] as usize * 32);
        let (mut seen, mut node) = (text.to_vec(), row as i32 % 7);
        while node >= 0 {
            seen.extend(&own[node as usize * 32..][..32]);
            node = parents[row / 7 * 7 + node as usize];
        }
        let (shape, seq_k) = ([1, 1, 4, 16], seen.len() / 32);
        let seen = View::new(&seen, &[1, seq_k, 2, 16]).unwrap();
        let plan = context.plan(&full(), &Problem::new(1, 4, 1, 16).heads_kv(2).seq_k(seq_k)).unwrap();
        let (q, out) = (View::new(&q[row * 64..][..64], &shape).unwrap(), ViewMut::new(out, &shape).unwrap());
        plan.forward(q, seen, seen, out).run().unwrap();
    }

    let pages = View::new(&pages, &[10, 10, 2, 16]).unwrap();
    let (starts, table) = (View::new(&starts, &[2]).unwrap(), View::new(&table, &[2, 5]).unwrap());
    let offsets = View::new(&offsets, &[3]).unwrap();
    let (even, packed): (&[usize], &[usize]) = (&[2, 7, 4, 16], &[14, 4, 16]);
    for (problem, shape) in [(cache_problem(2, 7).page_size(10), even), (ragged_problem(14), packed)] {
        let plan = context.plan(&full(), &problem.parents(true)).unwrap();
        let (mut out, mut scoped) = (vec![f32::NAN; 14 * 64], vec![f32::NAN; 14 * 64]);
        let (q, parents) = (View::new(&q[..14 * 64], shape).unwrap(), View::new(&parents, &shape[..shape.len() - 2]));
        let (parents, out_view) = (parents.unwrap(), ViewMut::new(&mut out, shape).unwrap());
        let pass = plan.forward(q, pages, pages, out_view).starts(starts).page_table(table).parents(parents);
        if shape == packed { pass.query_offsets(offsets) } else { pass }.run().unwrap();
        assert!(distance(&out, &expected) < 1e-5);

        let (stream, out_view) = (Counted(Cell::new(0)), ViewMut::new(&mut scoped, shape).unwrap());
        plan.scope(&stream, |scope| {
            let pass = scope.forward(q, pages, pages, out_view).starts(starts).page_table(table).parents(parents);
            if shape == packed { pass.query_offsets(offsets) } else { pass }.run()
        })
        .unwrap();
        assert_eq!(out, scoped);
    }
}

#[test]
fn layers_share_a_layout() {
    // Layers behind the first have other queries, keys and values, and get the bits of calls that make their own
    // layout; in a scope and outside.
    let context = context();
    let (table, starts, offsets) = ([4i32, 1, 6, 0, 3, 7, 2, 9, 5, 8], [31i64, 8], [0, 5, 14]);
    let parents = [-1, 0, 0, 1, 1, -1, 5, -1, -1, -1, 2, 3, 1, 4];
    let (starts, table) = (View::new(&starts, &[2]).unwrap(), View::new(&table, &[2, 5]).unwrap());
    let (offsets, parents) = (View::new(&offsets, &[3]).unwrap(), View::new(&parents, &[2, 7]).unwrap());
    let stream = Counted(Cell::new(0));
    let (even, packed): (&[usize], &[usize]) = (&[2, 7, 4, 16], &[14, 4, 16]);
    let (whole, paged) = (cache_problem(2, 7), cache_problem(2, 7).page_size(10));
    for form in ["entries", "pages", "packed", "trees"] {
        let (problem, shape, kv_shape) = match form {
            "entries" => (whole, even, [2, 50, 2, 16]),
            "pages" => (paged, even, [10, 10, 2, 16]),
            "packed" => (ragged_problem(14), packed, [10, 10, 2, 16]),
            _ => (paged.parents(true), even, [10, 10, 2, 16]),
        };
        let plan = context.plan(&local(), &problem).unwrap();
        let mut workspace = Workspace::new(&plan, Pass::Forward).unwrap();
        for layer in 0..4 {
            let (q, k, v) = (noise(14 * 64, layer + 1), noise(100 * 32, layer + 11), noise(100 * 32, layer + 21));
            let (mut expected, mut out) = (vec![0f32; q.len()], vec![f32::NAN; q.len()]);
            let q = View::new(&q, shape).unwrap();
            let (k, v) = (View::new(&k, &kv_shape).unwrap(), View::new(&v, &kv_shape).unwrap());
            /// Brings what this form of a cache wants.
            macro_rules! described {
                ($pass:expr) => {{
                    let pass = $pass.starts(starts);
                    let pass = if form == "entries" { pass } else { pass.page_table(table) };
                    let pass = if form == "packed" { pass.query_offsets(offsets) } else { pass };
                    if form == "trees" {
                        pass.parents(parents)
                    } else {
                        pass
                    }
                }};
            }
            described!(plan.forward(q, k, v, ViewMut::new(&mut expected, shape).unwrap())).run().unwrap();
            let (memory, out_view) = (workspace.view(), ViewMut::new(&mut out, shape).unwrap());
            // SAFETY: only these calls write to the workspace, and all have the same numbers and shapes.
            unsafe {
                if layer < 2 {
                    described!(plan.forward(q, k, v, out_view)).workspace(memory).same_step(layer > 0).run()
                } else {
                    plan.scope(&stream, |scope| {
                        described!(scope.forward(q, k, v, out_view)).workspace(memory).same_step(true).run()
                    })
                }
            }
            .unwrap();
            assert_eq!(out, expected, "{form}, layer {layer}");
        }
    }
}

#[test]
fn the_threads_workspace_keeps_no_layout() {
    // Whatever a call says of it: each of these begins at a token of its own.
    let (q, kv) = operands();
    let context = context();
    let plan = context.plan(&local(), &cache_problem(1, 1)).unwrap();
    let (cache, mut out, shape) = (View::new(&kv, &KV_SHAPE).unwrap(), vec![0f32; q.len()], [1, 1, 4, 16]);
    for (token, (q, out)) in q.chunks(64).zip(out.chunks_mut(64)).enumerate() {
        let (starts, out) = ([token as i32], ViewMut::new(out, &shape).unwrap());
        let pass = plan.forward(View::new(q, &shape).unwrap(), cache, cache, out);
        // SAFETY: the call has no workspace.
        unsafe { pass.starts(View::new(&starts, &[1]).unwrap()).same_step(true) }.run().unwrap();
    }
    assert!(distance(&out, &forward(&context.plan(&local(), &problem()).unwrap(), &q, &kv)) < 1e-5);
}

#[test]
fn parents_may_be_any_numbers() {
    // One that is negative, or not below the query's own, makes a root of it, and nothing outside of the views is read.
    let (q, kv) = operands();
    let plan = context().plan(&local(), &cache_problem(1, 50).parents(true)).unwrap();
    let kv = View::new(&kv, &KV_SHAPE).unwrap();
    let run = |start: i64, parent: i64| {
        let (starts, parents, mut out) = ([start], [parent; 50], vec![f32::NAN; q.len()]);
        plan.forward(View::new(&q, &SHAPE).unwrap(), kv, kv, ViewMut::new(&mut out, &SHAPE).unwrap())
            .starts(View::new(&starts, &[1]).unwrap())
            .parents(View::new(&parents, &[1, 50]).unwrap())
            .run()
            .unwrap();
        out
    };
    for start in [i64::MIN, -50, -7, 0, 7, 49, 50, i64::MAX] {
        let roots = run(start, -1);
        for parent in [i64::MIN, i64::from(i32::MIN), -2, 49, 50, i64::from(i32::MAX) + 1, i64::MAX] {
            assert_eq!(run(start, parent), roots, "{parent} from {start} on");
        }
        assert!(run(start, 3).iter().chain(&roots).all(|x| x.is_finite()));
    }
}

#[test]
fn caches_take_any_numbers() {
    // Safe code may say anything: nothing outside of the views is read, whatever comes of it.
    let (q, kv) = operands();
    let plan = context().plan(&local(), &cache_problem(1, 50).page_size(10)).unwrap();
    let pages = View::new(&kv, &[5, 10, 2, 16]).unwrap();
    for start in [i64::MIN, -50, -1, 0, 49, 50, i64::MAX] {
        for page in [i64::MIN, -1, 4, 5, i64::MAX] {
            let (starts, table, mut out) = ([start], [page; 5], vec![f32::NAN; q.len()]);
            plan.forward(View::new(&q, &SHAPE).unwrap(), pages, pages, ViewMut::new(&mut out, &SHAPE).unwrap())
                .starts(View::new(&starts, &[1]).unwrap())
                .page_table(View::new(&table, &[1, 5]).unwrap())
                .run()
                .unwrap();
            assert!(out.iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn packed_sequences() {
    let (q, kv) = operands();
    let context = context();
    let pattern = per_document(&causal(), &[0i64, 20, 50], &[0, 20, 50]);
    let plan = context.plan(&pattern, &problem().axes(Axes::Thd)).unwrap();
    let view = View::new(&kv, &KV_SHAPE[1..]).unwrap();
    let mut out = vec![0f32; q.len()];
    let out_view = ViewMut::new(&mut out, &SHAPE[1..]).unwrap();
    plan.forward(View::new(&q, &SHAPE[1..]).unwrap(), view, view, out_view).run().unwrap();
    let apart = context.plan(&(causal() & documents(&[0, 20, 50])), &problem()).unwrap();
    assert!(distance(&out, &forward(&apart, &q, &kv)) < 1e-5);
}

#[test]
fn values_in_keys_sinks_and_largest_scores() {
    let (q, kv) = operands();
    let shared = problem().value_in_key(true).head_dim_v(8).sink_logits(true).softcap(2.0);
    let plan = context().plan(&local(), &shared).unwrap();
    let (mut out, mut lse, mut largest) = (vec![0f32; 50 * 4 * 8], vec![0f32; 200], vec![0f32; 200]);
    let sinks = [0.5f32, -1.0, 2.0, 0.0];
    let out_view = ViewMut::new(&mut out, &[1, 50, 4, 8]).unwrap();
    plan.forward(View::new(&q, &SHAPE).unwrap(), View::new(&kv, &KV_SHAPE).unwrap(), None, out_view)
        .lse(ViewMut::new(&mut lse, &[1, 4, 50]).unwrap())
        .max_logits(ViewMut::new(&mut largest, &[1, 4, 50]).unwrap())
        .sink_logits(View::new(&sinks, &[4]).unwrap())
        .run()
        .unwrap();
    assert!(lse.iter().enumerate().all(|(i, lse)| *lse > sinks[i / 50]));
    assert!(largest.iter().all(|x| x.abs() <= 2.0));
    assert!(out.iter().all(|x| x.is_finite()));
}

/// Counts how often it was waited for. Work on the CPU is done when a call returns.
struct Counted(Cell<usize>);

// SAFETY: NULL is legal, and nothing runs later.
unsafe impl Stream for Counted {
    fn raw(&self) -> *mut c_void {
        std::ptr::null_mut()
    }
    fn wait(&self) -> std::result::Result<(), String> {
        self.0.set(self.0.get() + 1);
        Ok(())
    }
}

#[test]
fn scopes_wait_whatever_happens() {
    let (q, kv) = operands();
    let context = context();
    let stream = Counted(Cell::new(0));
    let plan = context.plan_on(&local(), &problem().backward(true), &stream).unwrap();
    let (mut out, mut lse) = (vec![0f32; q.len()], vec![0f32; 200]);
    let (q_view, kv_view) = (View::new(&q, &SHAPE).unwrap(), View::new(&kv, &KV_SHAPE).unwrap());
    {
        let (out, lse) = (ViewMut::new(&mut out, &SHAPE).unwrap(), ViewMut::new(&mut lse, &[1, 4, 50]).unwrap());
        plan.scope(&stream, |scope| scope.forward(q_view, kv_view, kv_view, out).lse(lse).run()).unwrap();
    }
    assert_eq!(stream.0.get(), 1);
    assert_eq!(out, forward(&plan, &q, &kv));
    let error = plan.scope(&stream, |_| View::new(&q, &[3]).map(|_| ())).unwrap_err();
    assert_eq!((error.kind(), stream.0.get()), (ErrorKind::Shape, 2));
    let panics = || plan.scope(&stream, |_| -> Result<()> { panic!("on purpose") });
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
    assert_eq!(stream.0.get(), 3);
}

#[test]
fn device_memory_wants_a_scope() {
    let (q, kv) = operands();
    let plan = context().plan(&local(), &problem()).unwrap();
    // SAFETY: nobody reads it: that is what is tested.
    let far = unsafe { View::from_raw(64 as *const c_void, Dtype::F32, Device::Cuda(0), &SHAPE, None).unwrap() };
    let kv = View::new(&kv, &KV_SHAPE).unwrap();
    let mut out = vec![0f32; q.len()];
    let error = plan.forward(far, kv, kv, ViewMut::new(&mut out, &SHAPE).unwrap()).run().unwrap_err();
    assert_eq!((error.kind(), error.argument()), (ErrorKind::State, "q"));
    let stream = Counted(Cell::new(0));
    let out = ViewMut::new(&mut out, &SHAPE).unwrap();
    let error = plan.scope(&stream, |scope| scope.forward(far, kv, kv, out).run()).unwrap_err();
    assert_eq!((error.kind(), stream.0.get()), (ErrorKind::Device, 1)); // the plan is for the CPU
}

#[test]
fn logs() {
    static LINES: AtomicUsize = AtomicUsize::new(0);
    let count = |_: LogLevel, text: &str| {
        assert!(!text.is_empty());
        LINES.fetch_add(1, Ordering::Relaxed);
    };
    common::open();
    let options = ContextOptions::new().device(Device::Cpu).cpu_threads(1).plan_cache(-1);
    let context = Context::with(options.log(LogLevel::Debug, Box::leak(Box::new(count)))).unwrap();
    context.clone().plan(&local(), &problem()).unwrap();
    assert!(LINES.load(Ordering::Relaxed) > 0);
}

#[test]
fn threads_of_the_program_run_tasks() {
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    let (q, kv) = operands();
    let expected = forward(&context().plan(&local(), &problem()).unwrap(), &q, &kv);
    let with = |run| {
        let options = ContextOptions::new().device(Device::Cpu).cpu_threads(4).parallel(run);
        forward(&Context::with(options).unwrap().plan(&local(), &problem()).unwrap(), &q, &kv)
    };
    let on_threads = with(&|tasks, task| {
        ASKED.fetch_add(1, Ordering::Relaxed);
        std::thread::scope(|threads| (0..tasks).for_each(|_| drop(threads.spawn(task))));
    });
    assert_eq!(on_threads, expected);
    assert!(ASKED.load(Ordering::Relaxed) > 0);
    // Who runs none of the tasks, or more than there are, changes nothing.
    assert_eq!(with(&|_, _| ()), expected);
    assert_eq!(with(&|tasks, task| (0..tasks + 9).for_each(|_| task())), expected);
}

#[test]
fn threads_share_handles() {
    let (q, kv) = operands();
    let plan = context().plan(&local(), &problem()).unwrap();
    let expected = forward(&plan, &q, &kv);
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                for _ in 0..20 {
                    assert_eq!(forward(&plan.clone(), &q, &kv), expected);
                }
            });
        }
    });
}
