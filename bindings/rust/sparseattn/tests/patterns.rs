// SPDX-License-Identifier: MIT
//! Patterns: every constructor is its text; values, questions; and the misuse matrix: an error that names the argument,
//! never a crash.
mod common;
use sparseattn::*;
use std::collections::HashSet;

const HUGE: usize = usize::MAX;

#[test]
fn every_constructor_is_its_text() {
    common::open();
    let bits = [1u8, 0, 0, 1, 1, 0];
    let few = Xref { sinks: -1, window: 1, budget: 8, ..Xref::default() };
    let table = [
        (full(), "full"),
        (causal(), "causal"),
        (logsparse(), "logsparse"),
        (window(3, -1), "window(3,-1)"),
        (sink(4), "sink(4)"),
        (block_diagonal(4), "block_diagonal(4)"),
        (strided(3), "strided(3)"),
        (dilated(6, 0, 3), "dilated(6,0,3)"),
        (landmark(4, 1), "landmark(4,1)"),
        (fixed(5, 2), "fixed(5,2)"),
        (residue(3, 2), "residue(3,2)"),
        (documents(&[0i32, 3, 8]), "documents(0,3,8)"),
        (documents(&[0i64, 3, 8]), "documents(0,3,8)"),
        (global_keys(&[7i64, 2, 9]), "global_keys(7,2,9)"),
        (global_keys::<i64>(&[]), "global_keys()"),
        (global_tokens(&[2]), "global_tokens(2)"),
        (tree(&[-1, 0, 0, 1]), "tree(-1,0,0,1)"),
        (bigbird(4, 3, 1, 2, 11), "bigbird(4,3,1,2,11)"),
        (xref(&[7, 8, 7], None, Xref::default()), "xref([7,8,7],[],32,64,224,112,7,3,10,32,48)"),
        (xref(&[7, 8], Some(View::new(&[4i64, -1, -1, 4], &[2, 2]).unwrap()), few), "xref([7,8],[4,-1,-1,4],0,1,8)"),
        (xref_extend(&xref(&[7], None, few), &[8], None), "xref([7,8],[],0,1,8)"),
        (csr(&[0, 2, 3], &[0, 4, 1], 5), "csr([0,2,3],[0,4,1],5)"),
        (bsr(&[0, 1], &[0], 64, 64, 9, 11), "bsr([0,1],[0],64,64,9,11)"),
        (mask(View::new(&bits, &[2, 3]).unwrap()), "mask([1,0,0,1,1,0],2,3)"),
        (mask(View::new(&bits.map(|bit| bit != 0), &[2, 3]).unwrap()), "mask([1,0,0,1,1,0],2,3)"),
        (predicate(1, 2, 3, |_, q, k| bits[q * 3 + k] != 0), "mask([1,0,0,1,1,0],1,2,3)"),
        (runtime_tokens(8), "runtime_tokens(8)"),
        (runtime_blocks(64, 32, 4), "runtime_blocks(64,32,4)"),
        (transpose(&window(4, 1)), "transpose(window(4,1))"),
        (per_head(&[causal(), full()], &[0, 1, 1]), "per_head([0,1,1],causal,full)"),
        (per_batch(&[sink(5), sink(3)], &[0, 1]), "per_batch([0,1],sink(5),sink(3))"),
        (
            grid(&[GridAxis::new(6, window(1, 1)), GridAxis::new(8, causal()).tile(4)]),
            "grid([6,8],[6,4],window(1,1),causal)",
        ),
        (per_document(&causal(), &[0, 4], &[0, 9]), "per_document([0,4],[0,9],causal)"),
        (rows(&causal(), &[[12i32, 16], [0, 4]], 16), "rows([12,16,0,4],16,causal)"),
        (rows(&runtime_tokens(8), &[[5i64, 9]], 9), "rows([5,9],9,runtime_tokens(8))"),
        (columns(&causal(), &[[12i32, 16], [0, 4]], 16), "columns([12,16,0,4],16,causal)"),
        (columns(&causal(), &[[5i64, 9]], 9) & runtime_tokens(8), "columns([5,9],9,causal) & runtime_tokens(8)"),
        (causal() & (window(3, 0) | sink(1)), "causal & (window(3,0) | sink(1))"),
        (union(&[sink(1), causal(), full()]), "sink(1) | causal | full"),
        (intersection(&[sink(1), causal(), full()]), "sink(1) & causal & full"),
        (full() - causal(), "full - causal"),
    ];
    for (pattern, text) in table {
        assert_eq!(pattern, text.parse().unwrap(), "{text}");
        assert_eq!(pattern.to_string().parse::<Pattern>().unwrap(), pattern);
        assert_eq!(Pattern::load(&pattern.save().unwrap()).unwrap(), pattern);
    }
}

#[test]
fn patterns_are_values() {
    common::open();
    let (one, two) = (window(3, 0), window(3, 0));
    assert_eq!(one, two.clone());
    assert_ne!(one, sink(1));
    let set: HashSet<Pattern> = [one.clone(), two, sink(1) | &one, &one | &sink(1)].into();
    assert_eq!(set.len(), 2);
    assert_eq!(format!("{one:>14}|{one:?}"), "   window(3,0)|Pattern(window(3,0))");
    let moved = std::thread::spawn(move || one.stats(8).unwrap()).join().unwrap();
    assert_eq!(moved.row_max, 4);
}

#[test]
fn questions() {
    common::open();
    let pattern = causal() & window(2, 0);
    assert!(pattern.keeps(12, 0, 5, 3).unwrap() && !pattern.keeps(12, 0, 5, 2).unwrap());
    let stats = pattern.stats(12).unwrap();
    assert_eq!((stats.pairs, stats.row_min, stats.row_max), (33.0, 1, 3));
    let lists = pattern.to_csr(12, 0).unwrap();
    assert_eq!((lists.row_ptr.len(), lists.columns.len()), (13, 33));
    assert_eq!(
        csr(&lists.row_ptr, &lists.columns.iter().map(|k| *k as i64).collect::<Vec<_>>(), 12).stats(12).unwrap().pairs,
        33.0
    );
    assert_eq!((full() - full()).to_csr(12, 0).unwrap().columns, []);
    let many = Extent::new(4, (1 << 31) - 1).batch(1 << 20).heads(1 << 20); // the lists of one of which are short
    assert_eq!(window(1, 0).to_csr(many, 7).unwrap().columns.len(), 8);
    assert_eq!(causal().stats(Extent::new(12, 12).q_offset(12)).unwrap().pairs, 144.0);
    assert_eq!(causal().stats((1, 12)).unwrap().pairs, 12.0);
    assert_eq!(causal().stats(Extent::new(12, 12).blocks(4, 4)).unwrap().blocks_full, 3);
    assert_eq!(
        per_batch(&[full(), sink(1)], &[1, 0]).to_mask(Extent::new(2, 2).batch(2)).unwrap(),
        [1, 0, 1, 0, 1, 1, 1, 1]
    );
    let (q, k) = (rows(&causal(), &[[2, 3], [0, 1]], 4), columns(&causal(), &[[2, 4], [0, 1]], 4));
    assert_eq!(q.to_mask(Extent::new(2, 4)).unwrap(), [1, 1, 1, 0, 1, 0, 0, 0]);
    assert_eq!(k.to_mask(Extent::new(4, 3)).unwrap(), [0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1]);
    assert!(per_batch(&[full(), sink(1)], &[1, 0]).keeps_in_batch(Extent::new(2, 2).batch(2), 1, 0, 0, 1).unwrap());
}

#[test]
fn panics_of_predicates_arrive() {
    common::open();
    let panic =
        std::panic::catch_unwind(|| predicate(1, 4, 4, |_, q, _| if q < 2 { true } else { panic!("at row {q}") }));
    assert_eq!(panic.unwrap_err().downcast_ref::<String>().unwrap(), "at row 2");
}

fn demand<T>(result: Result<T>, kind: ErrorKind, argument: &str) {
    let error = result.err().unwrap_or_else(|| panic!("{argument}: no error"));
    assert_eq!((error.kind(), error.argument()), (kind, argument), "{error}");
    assert!(!error.message().is_empty() && error.to_string() == error.message());
}

#[test]
fn wrong_numbers_and_lists() {
    common::open();
    use ErrorKind::*;
    for bad in [-2, i64::MIN] {
        demand(window(bad, 0).check(), Range, "left");
        demand(window(0, bad).check(), Range, "right");
        demand(dilated(bad, 0, 1).check(), Range, "left");
    }
    demand(block_diagonal(0).check(), Range, "block");
    demand(dilated(1, 1, 0).check(), Range, "dilation");
    demand(strided(0).check(), Range, "stride");
    demand(landmark(4, 5).check(), Range, "landmarks");
    demand(landmark(4, HUGE).check(), Range, "landmarks");
    demand(fixed(0, 0).check(), Range, "block");
    demand(residue(4, 4).check(), Range, "offset");
    demand(residue(0, 0).check(), Range, "modulus");
    demand(bigbird(0, 1, 1, 1, 0).check(), Range, "params.block");
    demand(bigbird(4, 2, 1, 1, 0).check(), Range, "params.window_blocks");
    for bad in [0, HUGE] {
        demand(csr(&[0, 1], &[0], bad).check(), Range, "seq_k");
        demand(bsr(&[0, 1], &[0], 4, 4, bad, 4).check(), Range, "seq_q");
        demand(rows(&causal(), &[[0, 1]], bad).check(), Range, "seq_q");
        demand(columns(&causal(), &[[0, 1]], bad).check(), Range, "seq_k");
        demand(runtime_tokens(bad).check(), Range, "max_tokens_per_row");
        demand(runtime_blocks(bad, 4, 4).check(), Range, "block_q");
        demand(runtime_blocks(4, bad, 4).check(), Range, "block_k");
        demand(runtime_blocks(4, 4, bad).check(), Range, "max_blocks_per_row");
        demand(predicate(bad, 4, 4, |_, _, _| true).check(), Range, "heads");
        demand(predicate(1, bad, 4, |_, _, _| true).check(), Range, "seq_q");
        demand(predicate(1, 4, bad, |_, _, _| true).check(), Range, "seq_k");
    }
    demand(documents(&[3, 2]).check(), Range, "cu_seqlens");
    demand(documents::<i32>(&[]).check(), Shape, "cu_seqlens");
    demand(global_keys(&[-1]).check(), Range, "positions");
    demand(tree(&[1, 0]).check(), Argument, "parents");
    demand(csr(&[1, 1], &[0], 4).check(), Range, "row_ptr");
    demand(csr(&[0, 1], &[4], 4).check(), Range, "col_idx");
    demand(mask(View::new(&[0f32; 4], &[2, 2]).unwrap()).check(), Dtype, "mask");
    demand(union(&[]).check(), Range, "count");
    demand(per_head(&[causal(), full()], &[0, 2]).check(), Range, "part_of_head[1]");
    demand(per_batch(&[causal(), full()], &[0, -1]).check(), Range, "part_of_batch[1]");
    demand(grid(&[]).check(), Range, "axes");
    demand(grid(&[GridAxis::new(0, full())]).check(), Range, "sizes[0]");
    demand(grid(&[GridAxis::new(4, full()), GridAxis::new(6, full()).tile(4)]).check(), Range, "tile[1]");
    demand(per_document(&causal(), &[0, 4], &[0]).check(), Shape, "cu_k");
    demand(rows::<i64>(&causal(), &[], 9).check(), Shape, "ranges");
    demand(rows(&causal(), &[[0, 4], [4, 4]], 9).check(), Range, "ranges");
    demand(rows(&causal(), &[[0, 4], [5, 10]], 9).check(), Range, "ranges");
    demand(rows(&causal(), &[[0, 4]], 9).stats(3), Shape, "pattern");
    demand(columns::<i64>(&causal(), &[], 9).check(), Shape, "ranges");
    demand(columns(&causal(), &[[0, 4], [4, 4]], 9).check(), Range, "ranges");
    demand(columns(&causal(), &[[0, 4], [5, 10]], 9).check(), Range, "ranges");
    demand(columns(&causal(), &[[0, 4]], 9).stats(3), Shape, "pattern");
    demand(columns(&runtime_tokens(8), &[[0, 4]], 9).check(), Unsupported, "inner");
}

#[test]
fn wrong_texts_and_bytes() {
    common::open();
    for text in ["", "cuasal", "causal &", "window(1)", "(causal", "causal\u{ff}", "caus\0al"] {
        demand(text.parse::<Pattern>(), ErrorKind::Format, "text");
    }
    demand(Pattern::load(&[1, 2, 3]), ErrorKind::Format, "bytes");
    demand(Pattern::load(&[]), ErrorKind::Format, "bytes");
    let mut bytes = causal().save().unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    demand(Pattern::load(&bytes), ErrorKind::Format, "bytes");
}

#[test]
fn patterns_grow_in_place() {
    common::open();
    let mut pattern = causal();
    pattern &= window(9, 0);
    pattern |= &sink(4);
    pattern -= global_keys(&[7]);
    assert_eq!(pattern, ((causal() & window(9, 0)) | sink(4)) - global_keys(&[7]));
    pattern &= window(-2, 0);
    assert_eq!(pattern.check().unwrap_err().argument(), "left");
}

#[test]
fn errors_stay_with_what_is_made_of_them() {
    let context = common::context();
    let wrong = window(-2, 0);
    for pattern in [
        causal() & &wrong,
        &wrong | sink(1),
        full() - &wrong,
        transpose(&wrong),
        per_head(&[causal(), wrong.clone()], &[0, 1]),
        per_document(&wrong, &[0, 1], &[0, 1]),
        rows(&wrong, &[[0, 1]], 1),
        columns(&wrong, &[[0, 1]], 1),
    ] {
        demand(pattern.check(), ErrorKind::Range, "left");
        demand(pattern.stats(8), ErrorKind::Range, "left");
        demand(pattern.save(), ErrorKind::Range, "left");
        demand(pattern.keeps(8, 0, 0, 0), ErrorKind::Range, "left");
        demand(pattern.to_mask(8), ErrorKind::Range, "left");
        demand(pattern.to_csr(8, 0), ErrorKind::Range, "left");
        demand(context.plan(&pattern, &Problem::new(1, 1, 8, 4)), ErrorKind::Range, "left");
        assert!(pattern.to_string().starts_with('<'));
    }
    assert_eq!(wrong, window(-2, 0));
    assert_ne!(wrong, causal());
    assert_eq!(HashSet::from([wrong.clone(), wrong]).len(), 1);
}

#[test]
fn wrong_questions() {
    common::open();
    let extent = Extent::new(6, 9).heads(2);
    for bad in [9, HUGE] {
        demand(causal().keeps(extent, 0, bad, 0), ErrorKind::Range, "q");
        demand(causal().keeps(extent, 0, 0, bad), ErrorKind::Range, "k");
        demand(causal().keeps(extent, bad, 0, 0), ErrorKind::Range, "head");
        demand(causal().keeps_in_batch(extent, bad, 0, 0, 0), ErrorKind::Range, "batch");
        demand(causal().to_csr(extent, bad), ErrorKind::Range, "head");
        demand(causal().to_image(extent, bad, 2, 2), ErrorKind::Range, "head");
    }
    for (name, extent) in [
        ("extent.seq_q", Extent::new(0, 9)),
        ("extent.seq_k", Extent::new(9, HUGE)),
        ("extent.batch", extent.batch(HUGE)),
        ("extent.heads", extent.heads(HUGE)),
        ("extent.block_q", extent.blocks(1025, 64)),
        ("extent.block_k", extent.blocks(64, HUGE)),
        ("extent.q_offset", extent.q_offset(i64::MIN)),
    ] {
        demand(causal().stats(extent), ErrorKind::Range, name);
    }
    assert_eq!(causal().to_mask(Extent::new(HUGE, HUGE)).unwrap_err().kind(), ErrorKind::Range);
    assert_eq!(causal().to_image(extent, 0, HUGE, 2).unwrap_err().kind(), ErrorKind::Shape);
    demand(causal().to_image(extent, 0, 7, 2), ErrorKind::Shape, "coverage");
    demand(runtime_tokens(4).stats(8), ErrorKind::Unsupported, "pattern");
}

/// An answer that no memory holds is an error, not the end of the process.
#[test]
fn answers_beyond_memory() {
    common::open();
    demand(causal().to_mask(1 << 28), ErrorKind::HostMemory, "out");
    demand(causal().to_csr(1 << 24, 0), ErrorKind::HostMemory, "col_idx");
    demand(causal().to_image(1 << 28, 0, 1 << 28, 1 << 20), ErrorKind::HostMemory, "coverage");
}

#[test]
fn wrong_problems_and_operands() {
    let context = common::context();
    let good = Problem::new(1, 4, 8, 4);
    for (name, problem) in [
        ("problem.batch", Problem::new(HUGE, 4, 8, 4)),
        ("problem.heads_q", Problem::new(1, HUGE, 8, 4)),
        ("problem.heads_kv", good.heads_kv(3)),
        ("problem.seq_q", Problem::new(1, 4, HUGE, 4)),
        ("problem.seq_k", good.seq_k(HUGE)),
        ("problem.head_dim", Problem::new(1, 4, 8, 1025)),
        ("problem.head_dim_v", good.head_dim_v(HUGE)),
        ("problem.scale", good.scale(f64::NAN)),
        ("problem.softcap", good.softcap(-1.0)),
        ("problem.q_offset", good.q_offset(i64::MAX)),
    ] {
        demand(context.plan(&causal(), &problem), ErrorKind::Range, name);
    }
    demand(context.plan(&causal(), &good.dtype(Dtype::I32)), ErrorKind::Dtype, "problem.dtype");
    let nowhere = Context::with(ContextOptions::new().device(Device::Cuda(-7)));
    assert!(nowhere.is_err());
    demand(Context::with(ContextOptions::new().cpu_threads(-1)).map(|_| ()), ErrorKind::Range, "options.cpu_threads");

    let plan = context.plan(&causal(), &good.backward(true)).unwrap();
    let shape = [1, 8, 4, 4];
    let (x, lse, longs) = (vec![1f32; 128], vec![1f32; 32], vec![1f64; 128]);
    let view = View::new(&x, &shape).unwrap();
    let forward = |q, k, v: Option<View>, mut out: Vec<f32>, out_shape: &[usize]| {
        plan.forward(q, k, v, ViewMut::new(&mut out, out_shape).unwrap()).run()
    };
    forward(view, view, Some(view), x.clone(), &shape).unwrap();
    let wrong_shape = View::new(&x, &[1, 4, 8, 4]).unwrap();
    let wrong_axes = View::new(&x, &[32, 4]).unwrap();
    let wrong_dtype = View::new(&longs, &shape).unwrap();
    demand(forward(wrong_shape, view, Some(view), x.clone(), &shape), ErrorKind::Shape, "q");
    demand(forward(view, wrong_axes, Some(view), x.clone(), &shape), ErrorKind::Shape, "k");
    demand(forward(view, view, Some(wrong_dtype), x.clone(), &shape), ErrorKind::Dtype, "v");
    demand(forward(view, view, None, x.clone(), &shape), ErrorKind::Null, "v");
    demand(forward(view, view, Some(view), x.clone(), &[128]), ErrorKind::Shape, "out");
    let mut out = x.clone();
    let mut small = [0u8; 1];
    let call = plan.forward(view, view, view, ViewMut::new(&mut out, &shape).unwrap());
    demand(call.workspace(ViewMut::new(&mut small, &[1]).unwrap()).run(), ErrorKind::Workspace, "workspace_bytes");
    let call = plan.forward(view, view, view, ViewMut::new(&mut out, &shape).unwrap());
    let mut floats = [0f32; 64];
    demand(call.workspace(ViewMut::new(&mut floats, &[64]).unwrap()).run(), ErrorKind::Shape, "workspace");
    let call = plan.forward(view, view, view, ViewMut::new(&mut out, &shape).unwrap());
    demand(call.indices(view).run(), ErrorKind::State, "indices");

    let saved = Saved { q: view, k: view, v: Some(view), out: view, lse: View::new(&lse, &[1, 4, 8]).unwrap() };
    let backward = |saved, dout, dq_shape: &[usize]| {
        let (mut dq, mut dk, mut dv) = (x.clone(), x.clone(), x.clone());
        let gradients = Gradients {
            dq: ViewMut::new(&mut dq, dq_shape).unwrap(),
            dk: ViewMut::new(&mut dk, &shape).unwrap(),
            dv: Some(ViewMut::new(&mut dv, &shape).unwrap()),
        };
        plan.backward(saved, dout, gradients).run()
    };
    backward(saved, view, &shape).unwrap();
    demand(backward(Saved { v: None, ..saved }, view, &shape), ErrorKind::Null, "v");
    demand(backward(Saved { lse: view, ..saved }, view, &shape), ErrorKind::Shape, "lse");
    demand(backward(saved, wrong_dtype, &shape), ErrorKind::Dtype, "dout");
    demand(backward(saved, view, &[128]), ErrorKind::Shape, "dq");
}

#[test]
fn statuses_of_newer_libraries() {
    assert_eq!(ErrorKind::from_status(1003), ErrorKind::Shape);
    assert_eq!(ErrorKind::from_status(7777), ErrorKind::Other(7777));
    assert_eq!(ErrorKind::from_status(-1), ErrorKind::Other(-1));
}
