// SPDX-License-Identifier: MIT
//! A plan, a forward and a backward pass, and a check of the gradient by small differences. The same program in C, C++
//! and Python lies in bindings/examples.
use sparseattn::{causal, sink, window, Context, Gradients, Problem, Result, Saved, View, ViewMut};

const HEADS: usize = 2;
const SEQ: usize = 256;
const DIM: usize = 16;
const SIZE: usize = SEQ * HEADS * DIM;
const SHAPE: [usize; 4] = [1, SEQ, HEADS, DIM];
const LSE_SHAPE: [usize; 3] = [1, HEADS, SEQ];

fn main() -> Result<()> {
    #[cfg(feature = "load")]
    // SAFETY: the library that the dynamic linker finds is the installed one.
    unsafe {
        sparseattn::load(None)?
    };
    let noise =
        |i: usize| ((i as u32).wrapping_mul(2654435761) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    let [mut q, k, v] = [0, 1, 2].map(|part| {
        (part * SIZE..(part + 1) * SIZE)
            .map(noise)
            .collect::<Vec<f32>>()
    });
    let (k, v) = (View::new(&k, &SHAPE)?, View::new(&v, &SHAPE)?);

    let pattern = causal() & (sink(4) | window(31, 0));
    let plan = Context::cpu()?.plan(&pattern, &Problem::new(1, HEADS, SEQ, DIM).backward(true))?;

    // Half the sum of squares of out, whose gradient at out is out itself.
    let (mut out, mut lse) = (vec![0f32; SIZE], vec![0f32; HEADS * SEQ]);
    let loss = |q: &[f32], out: &mut [f32], lse: &mut [f32]| -> Result<f64> {
        plan.forward(View::new(q, &SHAPE)?, k, v, ViewMut::new(out, &SHAPE)?)
            .lse(ViewMut::new(lse, &LSE_SHAPE)?)
            .run()?;
        Ok(out.iter().map(|x| 0.5 * *x as f64 * *x as f64).sum())
    };
    loss(&q, &mut out, &mut lse)?;

    let (mut dq, mut dk, mut dv) = (vec![0f32; SIZE], vec![0f32; SIZE], vec![0f32; SIZE]);
    let out_view = View::new(&out, &SHAPE)?;
    let saved = Saved {
        q: View::new(&q, &SHAPE)?,
        k,
        v: Some(v),
        out: out_view,
        lse: View::new(&lse, &LSE_SHAPE)?,
    };
    let gradients = Gradients {
        dq: ViewMut::new(&mut dq, &SHAPE)?,
        dk: ViewMut::new(&mut dk, &SHAPE)?,
        dv: Some(ViewMut::new(&mut dv, &SHAPE)?),
    };
    plan.backward(saved, out_view, gradients).run()?;

    let step = 0.01;
    q[1000] += step;
    let above = loss(&q, &mut out, &mut lse)?;
    q[1000] -= 2.0 * step;
    let numeric = (above - loss(&q, &mut out, &mut lse)?) / (2.0 * step as f64);
    println!("dq[1000] = {:.5}, by differences {numeric:.5}", dq[1000]);
    assert!((numeric - dq[1000] as f64).abs() < 1e-3);
    Ok(())
}
