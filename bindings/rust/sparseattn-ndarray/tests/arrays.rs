// SPDX-License-Identifier: MIT
//! Arrays in any order of axes are the same operands.
use half::bf16;
use ndarray::{s, Array3, Array4};
use sparseattn::{causal, window, Context, Dtype, ErrorKind, Gradients, Problem, Saved};
use sparseattn_ndarray::{view, view_mut};

fn context() -> Context {
    #[cfg(feature = "load")]
    {
        let path = std::env::var_os("SPARSEATTN_LIBRARY").map(std::path::PathBuf::from);
        unsafe { sparseattn::load(path.as_deref()).unwrap() };
    }
    Context::cpu().unwrap()
}

fn noise(shape: (usize, usize, usize, usize), seed: usize) -> Array4<f32> {
    let mut state = seed as u32;
    Array4::from_shape_simple_fn(shape, || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    })
}

#[test]
fn axes_in_any_order_forward_and_backward() {
    let pattern = causal() & window(7, 0);
    let plan = context().plan(&pattern, &Problem::new(2, 4, 30, 8).heads_kv(2).backward(true)).unwrap();
    let (q, k, v) = (noise((2, 30, 4, 8), 1), noise((2, 30, 2, 8), 2), noise((2, 30, 2, 8), 3));
    let run = |q: &ndarray::ArrayView4<f32>, k: &ndarray::ArrayView4<f32>| {
        let (mut out, mut lse) = (Array4::<f32>::zeros(q.raw_dim()), Array3::<f32>::zeros((2, 4, 30)));
        let forward = plan.forward(view(q).unwrap(), view(k).unwrap(), view(&v).unwrap(), view_mut(&mut out).unwrap());
        forward.lse(view_mut(&mut lse).unwrap()).run().unwrap();
        let (mut dq, mut dk, mut dv) =
            (Array4::<f32>::zeros(q.raw_dim()), Array4::<f32>::zeros(k.raw_dim()), Array4::<f32>::zeros(v.raw_dim()));
        let saved = Saved {
            q: view(q).unwrap(),
            k: view(k).unwrap(),
            v: Some(view(&v).unwrap()),
            out: view(&out).unwrap(),
            lse: view(&lse).unwrap(),
        };
        let gradients = Gradients {
            dq: view_mut(&mut dq).unwrap(),
            dk: view_mut(&mut dk).unwrap(),
            dv: Some(view_mut(&mut dv).unwrap()),
        };
        plan.backward(saved, view(&out).unwrap(), gradients).run().unwrap();
        (out, dq, dk, dv)
    };
    // The same numbers with heads before tokens in memory, and every second token of a longer array.
    let swapped = q.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().to_owned();
    let mut longer = Array4::from_elem((2, 60, 2, 8), f32::NAN);
    longer.slice_mut(s![.., ..;2, .., ..]).assign(&k);
    let expected = run(&q.view(), &k.view());
    assert_eq!(run(&swapped.view().permuted_axes([0, 2, 1, 3]), &longer.slice(s![.., ..;2, .., ..])), expected);
    assert!(expected.1.iter().any(|x| *x != 0.0));
}

#[test]
fn halves() {
    let plan = context().plan(&causal(), &Problem::new(1, 1, 16, 4).dtype(Dtype::BF16)).unwrap();
    let x = Array4::from_elem((1, 16, 1, 4), bf16::from_f32(0.75));
    let mut out = Array4::from_elem(x.raw_dim(), bf16::ZERO);
    plan.forward(view(&x).unwrap(), view(&x).unwrap(), view(&x).unwrap(), view_mut(&mut out).unwrap()).run().unwrap();
    assert_eq!(out, x);
}

#[test]
fn arrays_that_run_backwards_are_refused() {
    let plan = context().plan(&causal(), &Problem::new(1, 1, 16, 4)).unwrap();
    let x = noise((1, 16, 1, 4), 5);
    let mut out = Array4::<f32>::zeros(x.raw_dim());
    let backwards = x.slice(s![.., ..;-1, .., ..]);
    let forward = |q: sparseattn::View, out| plan.forward(q, view(&x).unwrap(), view(&x).unwrap(), out).run();
    let error = forward(view(&backwards).unwrap(), view_mut(&mut out).unwrap()).unwrap_err();
    assert_eq!((error.kind(), error.argument()), (ErrorKind::Layout, "q"));
    assert!(error.message().contains("stride -4 on axis 1"), "{error}");
    let error = view(&noise((1, 1, 2, 2), 1).into_shape_with_order((1, 1, 1, 2, 2)).unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shape);
}
