// SPDX-License-Identifier: MIT
//! Context parallelism: four threads hold a sequence between them, and each is sent those keys and values of the others
//! that its queries see. Where these are processes, MPI or NCCL carry the bytes instead of channels:
//!
//!     cargo run --release --example ranks
use sparseattn::{
    causal, sink, window, Buffer, Context, Pattern, Plan, Problem, Result, Sharding, Split, View, ViewMut,
};
use std::sync::mpsc::{channel, Receiver, Sender};

const RANKS: usize = 4;
const SEQ: usize = 4096;
const HEADS: usize = 2;
const DIM: usize = 16;
const ROW: usize = HEADS * DIM;

/// A channel to each rank, and one from each.
type Post = (Vec<Sender<Vec<u8>>>, Vec<Receiver<Vec<u8>>>);

fn main() -> Result<()> {
    #[cfg(feature = "load")]
    // SAFETY: the library that the dynamic linker finds is the installed one.
    unsafe {
        sparseattn::load(None)?
    };
    let noise = |i: usize| ((i as u32).wrapping_mul(2654435761) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    let [q, k, v] = [0, 1, 2].map(|part| (0..SEQ * ROW).map(|i| noise(part * SEQ * ROW + i)).collect::<Vec<f32>>());

    let pattern = &(causal() & (sink(4) | window(255, 0)));
    let problem = &Problem::new(1, HEADS, SEQ, DIM); // of all tokens
    let one_device = attend(&Context::cpu()?.plan(pattern, problem)?, &q, &k, &v)?;

    let mut posts = [(); RANKS].map(|()| Post::default());
    for from in 0..RANKS {
        for to in 0..RANKS {
            let (sender, receiver) = channel();
            posts[from].0.push(sender);
            posts[to].1.push(receiver);
        }
    }
    let qkv = [&q[..], &k, &v];
    let done: Vec<_> = std::thread::scope(|threads| {
        let start = |(rank, post)| threads.spawn(move || run_rank(pattern, problem, rank, post, qkv));
        let ranks: Vec<_> = posts.into_iter().enumerate().map(start).collect();
        ranks.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    });
    let mut most = 0f32;
    for (rank, done) in done.into_iter().enumerate() {
        let (sharding, out) = done?;
        let (held, seen) = (&sharding.ranges(rank)?[0], sharding.seen().tokens);
        let received = (0..RANKS).map(|other| Ok(sharding.peer(other)?.tokens_received)).sum::<Result<usize>>()?;
        let others = SEQ - held.len();
        println!("rank {rank} holds tokens {held:?}, receives {received} of {others}, and its plan takes {seen} keys");
        most = out.iter().zip(&one_device[held.start * ROW..]).map(|(a, b)| (a - b).abs()).fold(most, f32::max);
    }
    println!("largest difference from one device: {most}");
    assert!(most < 1e-5);
    Ok(())
}

/// What a rank holds and sees, and the attention of its queries. It reads those rows of q, k and v alone that it holds.
fn run_rank(
    pattern: &Pattern,
    problem: &Problem,
    rank: usize,
    (to, from): Post,
    qkv: [&[f32]; 3],
) -> Result<(Sharding, Vec<f32>)> {
    let sharding = Sharding::new(&Context::cpu()?, pattern, problem, RANKS, rank, &Split::Contiguous)?;
    let (held, seen) = (sharding.ranges(rank)?[0].clone(), sharding.seen().tokens);
    let [q, k, v] = qkv.map(|x| &x[held.start * ROW..held.end * ROW]);
    let (held_shape, seen_shape) = ([1, held.len(), HEADS, DIM], [1, seen, HEADS, DIM]);
    let keys = (View::new(k, &held_shape)?, View::new(v, &held_shape)?);

    let (sent, received) = sharding.buffers();
    let (mut sent, mut received) = (Buffer::new(sent)?, Buffer::new(received)?);
    sharding.pack(keys, &mut sent).run()?;
    for (rank, other) in to.iter().enumerate() {
        other.send(sent[sharding.peer(rank)?.sent].to_vec()).expect("all ranks receive");
    }
    for (rank, other) in from.iter().enumerate() {
        received[sharding.peer(rank)?.received].copy_from_slice(&other.recv().expect("all ranks send"));
    }
    let (mut seen_k, mut seen_v) = (vec![0f32; seen * ROW], vec![0f32; seen * ROW]);
    let seen = (ViewMut::new(&mut seen_k, &seen_shape)?, ViewMut::new(&mut seen_v, &seen_shape)?);
    sharding.unpack(keys, &received, seen).run()?;
    let out = attend(sharding.plan(), q, &seen_k, &seen_v)?;
    Ok((sharding, out))
}

fn attend(plan: &Plan, q: &[f32], k: &[f32], v: &[f32]) -> Result<Vec<f32>> {
    let (shape, kv_shape) = ([1, q.len() / ROW, HEADS, DIM], [1, k.len() / ROW, HEADS, DIM]);
    let mut out = vec![0f32; q.len()];
    let (k, v) = (View::new(k, &kv_shape)?, View::new(v, &kv_shape)?);
    plan.forward(View::new(q, &shape)?, k, v, ViewMut::new(&mut out, &shape)?).run()?;
    Ok(out)
}
