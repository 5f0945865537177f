// SPDX-License-Identifier: MIT
//! What a call costs beside its kernel: the smallest pass there is, of a plan that is held or looked up, here and through
//! the C ABI alone.
mod common;
use sparseattn::*;
use std::time::Instant;

/// The best of many batches, in nanoseconds a call.
fn best(mut call: impl FnMut()) -> f64 {
    const CALLS: u32 = 500;
    let batch = |_| {
        let begin = Instant::now();
        (0..CALLS).for_each(|_| call());
        begin.elapsed().as_nanos() as f64 / CALLS as f64
    };
    (0..200).map(batch).fold(f64::MAX, f64::min)
}

#[test]
fn a_call_costs_little_beside_its_kernel() {
    let context = common::context();
    let (pattern, problem) = (causal(), Problem::new(1, 1, 1, 1));
    let plan = context.plan(&pattern, &problem).unwrap();
    let (x, shape) = ([1f32], [1; 4]);
    let q = View::new(&x, &shape).unwrap();
    let mut out = [0f32];
    let mut run = |plan: &Plan| plan.forward(q, q, q, ViewMut::new(&mut out, &shape).unwrap()).run().unwrap();
    let held = best(|| run(&plan));
    let looked_up = best(|| run(&context.plan(&pattern, &problem).unwrap()));
    println!("forward of one token: {held:.0} ns, with its plan looked up {looked_up:.0} ns");
}
