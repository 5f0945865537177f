// SPDX-License-Identifier: MIT
//! Each operand of both passes wrong in every way that a view can be: an error that names it, and its kind. Caches that
//! cannot be, and calls that bring something else than their plan wants.
mod common;
use sparseattn::sys::spattn_tensor;
use sparseattn::*;

const HUGE: i64 = 1 << 62;

/// The operands of forward, then what backward has beside them, with their shapes.
const OPERANDS: [(&str, &[i64]); 15] = [
    ("q", &[2, 8, 4, 4]),
    ("k", &[2, 8, 2, 4]),
    ("v", &[2, 8, 2, 4]),
    ("out", &[2, 8, 4, 4]),
    ("lse", &[2, 4, 8]),
    ("max_logits", &[2, 4, 8]),
    ("sink_logits", &[4]),
    ("q", &[2, 8, 4, 4]),
    ("lse", &[2, 4, 8]),
    ("dout", &[2, 8, 4, 4]),
    ("dlse", &[2, 4, 8]),
    ("dq", &[2, 8, 4, 4]),
    ("dk", &[2, 8, 2, 4]),
    ("dv", &[2, 8, 2, 4]),
    ("dsink_logits", &[4]),
];
const FORWARD: usize = 7;

/// Memory and tensors of all operands, which `spoil` may change before they are used.
fn run(plan: &Plan, wrong: usize, spoil: impl FnOnce(&mut spattn_tensor, &mut Vec<i64>, &mut Vec<i64>)) -> Result<()> {
    let mut memory: Vec<Vec<f32>> = OPERANDS.map(|(_, shape)| vec![1.0; shape.iter().product::<i64>() as usize]).into();
    let mut shapes: Vec<Vec<i64>> = OPERANDS.map(|(_, shape)| shape.to_vec()).into();
    let mut strides = shapes.clone();
    for (strides, shape) in strides.iter_mut().zip(&shapes) {
        (0..shape.len()).for_each(|axis| strides[axis] = shape[axis + 1..].iter().product());
    }
    let mut tensors: Vec<spattn_tensor> = memory
        .iter_mut()
        .zip(&shapes)
        .map(|(memory, shape)| spattn_tensor {
            data: memory.as_mut_ptr().cast(),
            device: sys::spattn_device { type_: sys::SPATTN_CPU as i32, index: 0 },
            ndim: shape.len() as i32,
            dtype: sys::spattn_dtype { code: sys::SPATTN_FLOAT as u8, bits: 32, lanes: 1 },
            shape: std::ptr::null(),
            strides: std::ptr::null(),
            byte_offset: 0,
        })
        .collect();
    spoil(&mut tensors[wrong], &mut shapes[wrong], &mut strides[wrong]);
    for ((tensor, shape), strides) in tensors.iter_mut().zip(&shapes).zip(&strides) {
        (tensor.shape, tensor.strides) = (shape.as_ptr(), strides.as_ptr());
    }
    // SAFETY: shapes and strides have as many axes as ndim says; memory that is smaller than they say is never used,
    // which is what is tested.
    let (view, view_mut) =
        (|i: usize| unsafe { View::from_dlpack(&tensors[i]) }, |i: usize| unsafe { ViewMut::from_dlpack(&tensors[i]) });
    let (k, v, sinks) = (view(1)?, view(2)?, view(6)?);
    if wrong < FORWARD {
        let forward = plan.forward(view(0)?, k, v, view_mut(3)?).lse(view_mut(4)?);
        return forward.max_logits(view_mut(5)?).sink_logits(sinks).run();
    }
    let saved = Saved { q: view(7)?, k, v: Some(v), out: view(3)?, lse: view(8)? };
    let gradients = Gradients { dq: view_mut(11)?, dk: view_mut(12)?, dv: Some(view_mut(13)?) };
    let backward = plan.backward(saved, view(9)?, gradients).dlse(view(10)?).sink_logits(sinks);
    backward.dsink_logits(view_mut(14)?).run()
}

fn plan() -> Plan {
    let problem = Problem::new(2, 4, 8, 4).heads_kv(2).backward(true).sink_logits(true);
    common::context().plan(&causal(), &problem).unwrap()
}

#[test]
fn legal_operands_are_accepted() {
    let plan = plan();
    (0..OPERANDS.len()).for_each(|operand| run(&plan, operand, |_, _, _| {}).unwrap());
}

#[test]
fn every_operand_wrong_in_every_way() {
    use ErrorKind::*;
    let plan = plan();
    for (operand, (name, shape)) in OPERANDS.iter().enumerate() {
        let demand = |kind: ErrorKind, result: Result<()>| {
            let error = result.err().unwrap_or_else(|| panic!("{name}: no error"));
            assert_eq!((error.kind(), error.argument()), (kind, *name), "{error}");
        };
        demand(Null, run(&plan, operand, |tensor, _, _| tensor.data = std::ptr::null_mut()));
        demand(Dtype, run(&plan, operand, |tensor, _, _| tensor.dtype.bits = 64));
        demand(Dtype, run(&plan, operand, |tensor, _, _| tensor.dtype.code = 250));
        demand(Layout, run(&plan, operand, |tensor, _, _| tensor.byte_offset = 1));
        demand(Shape, run(&plan, operand, |tensor, _, _| tensor.ndim = 0));
        demand(Shape, run(&plan, operand, |tensor, _, _| tensor.ndim -= 1));
        for axis in 0..shape.len() {
            for size in [-1, 0, shape[axis] + 1, HUGE, i64::MIN] {
                demand(Shape, run(&plan, operand, |_, shape, _| shape[axis] = size));
            }
            for stride in [-1, HUGE, i64::MIN] {
                demand(Layout, run(&plan, operand, |_, _, strides| strides[axis] = stride));
            }
        }
        let far = run(&plan, operand, |tensor, _, _| tensor.device.type_ = sys::SPATTN_CUDA as i32);
        assert_eq!(far.unwrap_err().kind(), State); // nobody would wait for it
        for (ndim, lanes, device) in [(-1, 1, 1), (5, 1, 1), (i32::MAX, 1, 1), (4, 2, 1), (4, 1, 99)] {
            let wrong = run(&plan, operand, |tensor, _, _| {
                (tensor.dtype.lanes, tensor.device.type_) = (lanes, device);
                tensor.ndim = if ndim == 4 { tensor.ndim } else { ndim };
            });
            assert!(matches!(wrong.unwrap_err().kind(), Shape | Dtype | Device));
        }
    }
}

#[test]
fn caches() {
    use ErrorKind::*;
    let context = common::context();
    let plan = |problem: Problem| context.plan(&causal(), &problem);
    let cache = Problem::new(2, 2, 1, 4).seq_k(8).starts(true);
    let demand = |kind: ErrorKind, argument: &str, error: Error| {
        assert_eq!((error.kind(), error.argument()), (kind, argument), "{error}");
    };
    demand(Range, "problem.page_size", plan(cache.starts(false).page_size(4)).err().unwrap());
    for size in [3, 16, 65537, usize::MAX] {
        demand(Range, "problem.page_size", plan(cache.page_size(size)).err().unwrap());
    }
    demand(Unsupported, "problem.flags", plan(cache.backward(true)).err().unwrap());
    demand(Unsupported, "problem.flags", plan(cache.q_offset(0)).err().unwrap());
    demand(Unsupported, "pattern", context.plan(&(runtime_tokens(4) & sink(2)), &cache).err().unwrap());

    let (plain, whole, paged) =
        (plan(cache.starts(false)).unwrap(), plan(cache).unwrap(), plan(cache.page_size(4)).unwrap());
    let (q, kv, starts, table) = ([1f32; 16], [1f32; 128], [5, 2], [3, 0, 1, 2]);
    let (keys, pages) = (View::new(&kv, &[2, 8, 2, 4]).unwrap(), View::new(&kv, &[4, 4, 2, 4]).unwrap());
    let (starts, table) = (View::new(&starts, &[2]).unwrap(), View::new(&table, &[2, 2]).unwrap());
    let run = |plan: &Plan, kv, starts: Option<View>, table: Option<View>| {
        let mut out = [0f32; 16];
        let shape = [2, 1, 2, 4];
        let mut call = plan.forward(View::new(&q, &shape)?, kv, kv, ViewMut::new(&mut out, &shape)?);
        if let Some(starts) = starts {
            call = call.starts(starts);
        }
        if let Some(table) = table {
            call = call.page_table(table);
        }
        call.run()
    };
    run(&whole, keys, Some(starts), None).unwrap();
    run(&paged, pages, Some(starts), Some(table)).unwrap();
    let refused = |kind, argument, result: Result<()>| demand(kind, argument, result.unwrap_err());
    refused(State, "starts", run(&plain, keys, Some(starts), None));
    refused(State, "page_table", run(&plain, keys, None, Some(table)));
    refused(State, "page_table", run(&whole, keys, Some(starts), Some(table)));
    refused(Null, "starts", run(&whole, keys, None, None));
    refused(Null, "page_table", run(&paged, pages, Some(starts), None));
    refused(Shape, "k", run(&paged, keys, Some(starts), Some(table)));
    refused(Shape, "starts", run(&paged, pages, Some(table), Some(table)));
    refused(Shape, "page_table", run(&paged, pages, Some(starts), Some(starts)));
    refused(Dtype, "starts", run(&whole, keys, Some(View::new(&[5f32, 2.0], &[2]).unwrap()), None));

    // A layout of an earlier call, where calls make none.
    let (mut out, mut workspace, shape) =
        ([0f32; 16], sparseattn::Workspace::new(&plain, Pass::Forward).unwrap(), [2, 1, 2, 4]);
    let call = plain.forward(View::new(&q, &shape).unwrap(), keys, keys, ViewMut::new(&mut out, &shape).unwrap());
    // SAFETY: the plan has no layout that would be read there.
    refused(State, "args.flags", unsafe { call.workspace(workspace.view()).same_step(true) }.run());
}

#[test]
fn appends() {
    use ErrorKind::*;
    let context = common::context();
    let cache = Problem::new(2, 2, 3, 4).seq_k(8).starts(true);
    let (rows, starts, table, offsets) = ([1f32; 48], [5, 2], [3, 0, 1, 2], [0, 1, 3]);
    let (rows, starts) = (View::new(&rows, &[2, 3, 2, 4]).unwrap(), View::new(&starts, &[2]).unwrap());
    let (table, offsets) = (View::new(&table, &[2, 2]).unwrap(), View::new(&offsets, &[3]).unwrap());
    let refused = |kind: ErrorKind, argument: &str, result: Result<()>| {
        let error = result.unwrap_err();
        assert_eq!((error.kind(), error.argument()), (kind, argument), "{error}");
    };
    let (mut keys, mut values) = ([0f32; 128], [0f32; 128]);
    let (pages, whole) = ([4, 4, 2, 4], [2, 8, 2, 4]);
    let mut run = |problem: Problem, new: (View, Option<View>), shape: &[usize], given: &[(&str, View)]| {
        let v = new.1.map(|_| ViewMut::new(&mut values, shape).unwrap());
        let mut call = context.append(&problem, new, (ViewMut::new(&mut keys, shape)?, v), starts);
        for (name, view) in given {
            call = match *name {
                "counts" => call.counts(*view),
                "page_table" => call.page_table(*view),
                _ => call.query_offsets(*view),
            };
        }
        call.run()
    };
    let (both, paged) = ((rows, Some(rows)), cache.page_size(4));
    run(cache, both, &whole, &[("counts", starts)]).unwrap();
    run(paged, both, &pages, &[("page_table", table)]).unwrap();
    run(paged.value_in_key(true), (rows, None), &pages, &[("page_table", table)]).unwrap();
    refused(Range, "problem.flags", run(cache.starts(false), both, &whole, &[]));
    refused(Null, "page_table", run(paged, both, &pages, &[]));
    refused(State, "page_table", run(cache, both, &whole, &[("page_table", table)]));
    refused(State, "query_offsets", run(cache, both, &whole, &[("query_offsets", offsets)]));
    refused(Shape, "counts", run(cache, both, &whole, &[("counts", offsets)]));
    refused(Shape, "k", run(paged, both, &whole, &[("page_table", table)]));
    refused(Null, "v_new", run(cache, (rows, None), &whole, &[]));
    refused(State, "v_new", run(cache.value_in_key(true), both, &whole, &[]));
}

#[test]
fn float8_caches() {
    use ErrorKind::*;
    let context = common::context();
    let demand = |kind: ErrorKind, argument: &str, error: Error| {
        assert_eq!((error.kind(), error.argument()), (kind, argument), "{error}");
    };
    let plan = |problem: Problem| context.plan(&causal(), &problem);
    let cache = Problem::new(2, 2, 3, 4).seq_k(8).starts(true);
    let float8 = cache.cache_dtype(sparseattn::Dtype::F8_E4M3FN);
    demand(Dtype, "problem.cache_dtype", plan(float8.starts(false)).err().unwrap());
    for bad in [sparseattn::Dtype::F16, sparseattn::Dtype::U8] {
        demand(Dtype, "problem.cache_dtype", plan(cache.cache_dtype(bad)).err().unwrap());
    }

    let (floats, bits, starts, scales) = ([1f32; 128], [0x38u8; 128], [5, 2], [1f32; 32]);
    let (whole, rows) = (View::new(&floats, &[2, 8, 2, 4]).unwrap(), View::new(&floats[..48], &[2, 3, 2, 4]).unwrap());
    let keys = View::f8_e4m3fn(&bits, &[2, 8, 2, 4]).unwrap();
    let (starts, scales) = (View::new(&starts, &[2]).unwrap(), View::new(&scales, &[2, 8, 2]).unwrap());
    let run = |problem: Problem, kv, k_scales: View, v_scales: Option<View>| {
        let mut out = [0f32; 48];
        let out = ViewMut::new(&mut out, &[2, 3, 2, 4])?;
        let plan = plan(problem)?;
        let call = plan.forward(rows, kv, kv, out).starts(starts).k_scales(k_scales);
        match v_scales {
            Some(scales) => call.v_scales(scales).run(),
            None => call.run(),
        }
    };
    let refused = |kind, argument, result: Result<()>| demand(kind, argument, result.unwrap_err());
    run(float8, keys, scales, None).unwrap();
    run(float8, keys, scales, Some(scales)).unwrap();
    refused(State, "k_scales", run(cache, whole, scales, None));
    refused(Dtype, "k", run(float8, whole, scales, None));
    refused(Shape, "k_scales", run(float8, keys, rows, None));
    refused(Dtype, "k_scales", run(float8, keys, starts, None));
    refused(Shape, "v_scales", run(float8, keys, scales, Some(whole)));
    refused(Dtype, "v_scales", run(float8, keys, scales, Some(View::new(&bits[..32], &[2, 8, 2]).unwrap())));

    let append = |problem: Problem, with_values: bool| {
        let (mut keys, mut values, mut k_scales, mut v_scales) = ([0u8; 128], [0u8; 128], [0f32; 32], [0f32; 32]);
        let view = |bits| ViewMut::f8_e4m3fn(bits, &[2, 8, 2, 4]);
        let v_scales = ViewMut::new(&mut v_scales, &[2, 8, 2]).ok().filter(|_| with_values);
        let cache = (view(&mut keys)?, view(&mut values)?);
        let call = context.append(&problem, (rows, rows), cache, starts);
        call.choose_scales(ViewMut::new(&mut k_scales, &[2, 8, 2])?, v_scales).run()
    };
    append(float8, true).unwrap();
    refused(Null, "v_scales", append(float8, false));
    refused(Range, "args.flags", append(cache, true));
    let (mut keys, mut values, mut chosen) = ([0f32; 128], [0f32; 128], [0f32; 32]);
    let floats = (ViewMut::new(&mut keys, &[2, 8, 2, 4]).unwrap(), ViewMut::new(&mut values, &[2, 8, 2, 4]).unwrap());
    let call = context.append(&cache, (rows, rows), floats, starts);
    let chosen = ViewMut::new(&mut chosen, &[2, 8, 2]).unwrap();
    refused(Range, "args.flags", call.choose_scales(chosen, None).run());
}

#[test]
fn float8_operands() {
    use ErrorKind::*;
    let context = common::context();
    let demand = |kind: ErrorKind, argument: &str, error: Error| {
        assert_eq!((error.kind(), error.argument()), (kind, argument), "{error}");
    };
    let floats = Problem::new(2, 2, 8, 4).backward(true);
    let float8 = floats.dtype(sparseattn::Dtype::F8_E4M3FN);
    demand(Unsupported, "problem.dtype", context.plan(&causal(), &float8.backward(false).starts(true)).err().unwrap());

    let (numbers, halves, bits, shape) = ([1f32; 128], [0x3f80u16; 128], [0x38u8; 128], [2, 8, 2, 4]);
    let (f32s, f8s) = (View::new(&numbers, &shape).unwrap(), View::f8_e4m3fn(&bits, &shape).unwrap());
    let (scales, lse) =
        (View::new(&numbers[..32], &shape[..3]).unwrap(), View::new(&numbers[..32], &[2, 2, 8]).unwrap());
    let run = |pass: Pass, problem: Problem, [q, k, v]: [View; 3], [q_scales, k_scales, v_scales]: [View; 3]| {
        let (mut of_floats, mut of_halves) = ([[0f32; 128]; 3], [[0u16; 128]; 3]);
        let (mut written_floats, mut written_halves) = (of_floats.iter_mut(), of_halves.iter_mut());
        let mut output = || {
            if problem == floats {
                ViewMut::new(written_floats.next().unwrap(), &shape)
            } else {
                ViewMut::bf16(written_halves.next().unwrap(), &shape)
            }
        };
        let plan = context.plan(&causal(), &problem)?;
        let v = (problem != float8.value_in_key(true)).then_some(v);
        if pass == Pass::Forward {
            let call = plan.forward(q, k, v, output()?);
            return call.q_scales(q_scales).k_scales(k_scales).v_scales(v_scales).run();
        }
        let out = if problem == floats { f32s } else { View::bf16(&halves, &shape)? };
        let gradients = Gradients { dq: output()?, dk: output()?, dv: v.map(|_| output()).transpose()? };
        let call = plan.backward(Saved { q, k, v, out, lse }, out, gradients);
        call.q_scales(q_scales).k_scales(k_scales).v_scales(v_scales).run()
    };
    let refused = |kind, argument, result: Result<()>| demand(kind, argument, result.unwrap_err());
    let all = [scales; 3];
    let bytes = View::new(&bits[..32], &shape[..3]).unwrap();
    for pass in [Pass::Forward, Pass::Backward] {
        run(pass, float8, [f8s; 3], all).unwrap();
        refused(State, "q_scales", run(pass, floats, [f32s; 3], all));
        refused(State, "v_scales", run(pass, float8.value_in_key(true), [f8s; 3], all));
        let names = [("q", "q_scales"), ("k", "k_scales"), ("v", "v_scales")];
        for (i, (operand, its_scales)) in names.into_iter().enumerate() {
            let (mut operands, mut longer, mut of_bytes) = ([f8s; 3], all, all);
            (operands[i], longer[i], of_bytes[i]) = (f32s, f32s, bytes);
            refused(Dtype, operand, run(pass, float8, operands, all));
            refused(Shape, its_scales, run(pass, float8, [f8s; 3], longer));
            refused(Dtype, its_scales, run(pass, float8, [f8s; 3], of_bytes));
        }
    }
}

#[test]
fn queries_of_several_sequences() {
    use ErrorKind::*;
    let context = common::context();
    let plan = |problem: Problem| context.plan(&causal(), &problem);
    let ragged_of = |batch| Problem::new(batch, 2, 3, 4).axes(Axes::Thd).seq_k(8).starts(true).page_size(4);
    let ragged = ragged_of(2);
    let demand = |kind: ErrorKind, argument: &str, error: Error| {
        assert_eq!((error.kind(), error.argument()), (kind, argument), "{error}");
    };
    demand(Range, "problem.page_size", plan(ragged.page_size(0)).err().unwrap());
    demand(Range, "problem.batch", plan(ragged.starts(false).page_size(0)).err().unwrap());
    demand(Range, "problem.batch", plan(ragged_of(0)).err().unwrap());

    let (kv, starts, table, offsets) = ([1f32; 128], [5, 2, 0], [3, 0, 1, 2], [0i64, 1, 3]);
    let (pages, table) = (View::new(&kv, &[4, 4, 2, 4]).unwrap(), View::new(&table, &[2, 2]).unwrap());
    let (two, three) = (View::new(&starts[..2], &[2]).unwrap(), View::new(&starts, &[3]).unwrap());
    let offsets = View::new(&offsets, &[3]).unwrap();
    let run = |plan: &Plan, shape: &[usize], kv, cache: Option<(View, View)>, offsets: Option<View>| {
        let (q, mut out) = ([1f32; 24], [0f32; 24]);
        let mut call = plan.forward(View::new(&q, shape)?, kv, kv, ViewMut::new(&mut out, shape)?);
        if let Some((starts, table)) = cache {
            call = call.starts(starts).page_table(table);
        }
        if let Some(offsets) = offsets {
            call = call.query_offsets(offsets);
        }
        call.run()
    };
    let refused = |kind, offsets: Option<View>| {
        let result = run(&plan(ragged).unwrap(), &[3, 2, 4], pages, Some((two, table)), offsets);
        demand(kind, "query_offsets", result.unwrap_err());
    };
    run(&plan(ragged).unwrap(), &[3, 2, 4], pages, Some((two, table)), Some(offsets)).unwrap();
    refused(Null, None);
    refused(Shape, Some(two));
    refused(Shape, Some(table));
    refused(Dtype, Some(View::new(&[0f32, 1.0, 3.0], &[3]).unwrap()));

    // Offsets for a cache whose entries all have as many queries, and for packed tokens without a cache.
    let even = plan(Problem::new(3, 2, 1, 4).seq_k(4).starts(true).page_size(4)).unwrap();
    let cache = Some((three, View::new(&starts, &[3, 1]).unwrap()));
    run(&even, &[3, 1, 2, 4], pages, cache, None).unwrap();
    demand(State, "query_offsets", run(&even, &[3, 1, 2, 4], pages, cache, Some(offsets)).unwrap_err());
    let packed = plan(Problem::new(1, 2, 3, 4).axes(Axes::Thd)).unwrap();
    let keys = View::new(&kv[..24], &[3, 2, 4]).unwrap();
    run(&packed, &[3, 2, 4], keys, None, None).unwrap();
    demand(State, "query_offsets", run(&packed, &[3, 2, 4], keys, None, Some(offsets)).unwrap_err());
}

#[test]
fn nodes_of_trees() {
    use ErrorKind::*;
    let context = common::context();
    let plan = |problem: Problem| context.plan(&causal(), &problem);
    let trees = Problem::new(2, 2, 3, 4).seq_k(8).starts(true).parents(true);
    let demand = |kind: ErrorKind, argument: &str, error: Error| {
        assert_eq!((error.kind(), error.argument()), (kind, argument), "{error}");
    };
    demand(Unsupported, "problem.flags", plan(trees.starts(false)).err().unwrap());
    demand(Unsupported, "problem.flags", plan(trees.backward(true)).err().unwrap());
    demand(Unsupported, "problem.flags", context.plan(&runtime_tokens(4), &trees).err().unwrap());

    let (kv, starts, numbers) = ([1f32; 128], [5, 2], [-1, 0, 0, -1, -1, 1]);
    let (kv, starts) = (View::new(&kv, &[2, 8, 2, 4]).unwrap(), View::new(&starts, &[2]).unwrap());
    let parents = View::new(&numbers, &[2, 3]).unwrap();
    let run = |problem: Problem, starts: Option<View>, parents: Option<View>| {
        let (q, mut out, shape) = ([1f32; 48], [0f32; 48], [2, 3, 2, 4]);
        let plan = plan(problem)?;
        let mut call = plan.forward(View::new(&q, &shape)?, kv, kv, ViewMut::new(&mut out, &shape)?);
        if let Some(starts) = starts {
            call = call.starts(starts);
        }
        if let Some(parents) = parents {
            call = call.parents(parents);
        }
        call.run()
    };
    run(trees, Some(starts), Some(parents)).unwrap();
    let refused = |kind, argument, result: Result<()>| demand(kind, argument, result.unwrap_err());
    refused(Null, "parents", run(trees, Some(starts), None));
    refused(Null, "starts", run(trees, None, Some(parents)));
    refused(State, "parents", run(trees.parents(false), Some(starts), Some(parents)));
    refused(State, "parents", run(trees.starts(false).parents(false), None, Some(parents)));
    refused(Shape, "parents", run(trees, Some(starts), Some(starts)));
    refused(Shape, "parents", run(trees, Some(starts), Some(View::new(&numbers, &[3, 2]).unwrap())));
    refused(Shape, "parents", run(trees, Some(starts), Some(View::new(&numbers, &[6]).unwrap())));
    refused(Dtype, "parents", run(trees, Some(starts), Some(View::new(&[0f32; 6], &[2, 3]).unwrap())));
    refused(Dtype, "parents", run(trees, Some(starts), Some(View::new(&[0u8; 6], &[2, 3]).unwrap())));

    // Packed queries have one axis of parents.
    let (table, offsets) = ([0, 1], [0, 2, 3]);
    let (table, offsets) = (View::new(&table, &[2, 1]).unwrap(), View::new(&offsets, &[3]).unwrap());
    let packed = plan(trees.axes(Axes::Thd).page_size(8)).unwrap();
    let run = |parents: View| {
        let (q, mut out, shape) = ([1f32; 24], [0f32; 24], [3, 2, 4]);
        let call = packed.forward(View::new(&q, &shape)?, kv, kv, ViewMut::new(&mut out, &shape)?);
        call.starts(starts).page_table(table).query_offsets(offsets).parents(parents).run()
    };
    run(View::new(&numbers[..3], &[3]).unwrap()).unwrap();
    refused(Shape, "parents", run(parents));
    refused(Shape, "parents", run(View::new(&numbers, &[6]).unwrap()));
}
