// SPDX-License-Identifier: MIT
//! Top-k attention: for each query, the keys of the largest scores come as a list with the call, forward and backward.
//! The more keys, the nearer to attention with all of them:
//!
//!     cargo run --release --example top_k
use sparseattn::{causal, runtime_tokens, Context, Gradients, Pattern, Problem, Result, Saved, View, ViewMut};

const SEQ: usize = 256;
const HEADS: usize = 2;
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
    let noise = |i: usize| ((i as u32).wrapping_mul(2654435761) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    let mut qkv = [0, 1, 2].map(|part| (part * SIZE..(part + 1) * SIZE).map(noise).collect::<Vec<f32>>());
    qkv[0].iter_mut().for_each(|x| *x *= 8.0); // a model's queries look for few keys

    let (out, dq) = attend(&qkv, &causal(), None)?;
    let mut before = f32::MAX;
    for max in [8, 32, 128, SEQ] {
        // Lists of a call, cut by another pattern: a list that names a key of the future is harmless.
        let lists = top_k(&qkv[0], &qkv[1], max);
        let (some, dq_some) = attend(&qkv, &(causal() & runtime_tokens(max)), Some((&lists, max)))?;
        let error = distance(&some, &out);
        println!("{max:3} keys: out is {error:.6} away from that of all keys, dq {:.6}", distance(&dq_some, &dq));
        assert!(error < before);
        before = error;
    }
    assert!(before < 1e-5); // every key is in its list
    Ok(())
}

/// The keys of the `max` largest scores of each query and head, `[1, SEQ, HEADS, max]`.
fn top_k(q: &[f32], k: &[f32], max: usize) -> Vec<i32> {
    let row = |x: &[f32], token: usize, head: usize| -> Vec<f32> { x[(token * HEADS + head) * DIM..][..DIM].to_vec() };
    let mut lists = Vec::with_capacity(SEQ * HEADS * max);
    for (token, head) in (0..SEQ).flat_map(|token| (0..HEADS).map(move |head| (token, head))) {
        let q = row(q, token, head);
        let score = |key: usize| -> f32 { q.iter().zip(row(k, key, head)).map(|(q, k)| q * k).sum() };
        let mut keys: Vec<(f32, i32)> = (0..=token).map(|key| (score(key), key as i32)).collect();
        keys.sort_by(|a, b| b.0.total_cmp(&a.0));
        keys.resize(max, (0.0, -1)); // a list that is shorter ends with -1
        lists.extend(keys.iter().map(|(_, key)| key));
    }
    lists
}

/// out, and the gradient of half its sum of squares at q.
fn attend(
    [q, k, v]: &[Vec<f32>; 3],
    pattern: &Pattern,
    lists: Option<(&[i32], usize)>,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let plan = Context::cpu()?.plan(pattern, &Problem::new(1, HEADS, SEQ, DIM).backward(true))?;
    let [q, k, v] = [View::new(q, &SHAPE)?, View::new(k, &SHAPE)?, View::new(v, &SHAPE)?];
    let lists = match lists {
        Some((lists, max)) => Some(View::new(lists, &[1, SEQ, HEADS, max])?),
        None => None,
    };
    let (mut out, mut lse) = (vec![0f32; SIZE], vec![0f32; HEADS * SEQ]);
    let mut forward = plan.forward(q, k, v, ViewMut::new(&mut out, &SHAPE)?).lse(ViewMut::new(&mut lse, &LSE_SHAPE)?);
    if let Some(lists) = lists {
        forward = forward.indices(lists);
    }
    forward.run()?;

    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0f32; SIZE]);
    let out_view = View::new(&out, &SHAPE)?;
    let saved = Saved { q, k, v: Some(v), out: out_view, lse: View::new(&lse, &LSE_SHAPE)? };
    let gradients = Gradients {
        dq: ViewMut::new(&mut dq, &SHAPE)?,
        dk: ViewMut::new(&mut dk, &SHAPE)?,
        dv: Some(ViewMut::new(&mut dv, &SHAPE)?),
    };
    let mut backward = plan.backward(saved, out_view, gradients);
    if let Some(lists) = lists {
        backward = backward.indices(lists);
    }
    backward.run()?;
    Ok((out, dq))
}

/// The largest difference.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
