// SPDX-License-Identifier: MIT
//! What a call costs beside its kernel: the smallest pass that there is, through this crate and through the C ABI
//! alone.
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
    (0..100).map(batch).fold(f64::MAX, f64::min)
}

/// What no machine in use exceeds, in nanoseconds: a look-up of the plan, and all that this crate does.
const GOAL: f64 = 1200.0;

#[test]
fn a_call_costs_little_beside_the_c_abi() {
    if cfg!(debug_assertions) {
        return eprintln!("SKIPPED: without --release the time of a call means nothing");
    }
    common::open();
    let context = Context::with(ContextOptions::new().device(Device::Cpu).cpu_threads(1)).unwrap();
    let (pattern, problem) = (causal(), Problem::new(1, 1, 1, 1));
    let plan = context.plan(&pattern, &problem).unwrap();
    let (x, shape) = ([1f32], [1; 4]);
    let q = View::new(&x, &shape).unwrap();
    let mut out = [0f32];
    let mut run = |plan: &Plan| plan.forward(q, q, q, ViewMut::new(&mut out, &shape).unwrap()).run().unwrap();
    let held = best(|| run(&plan));
    let looked_up = best(|| run(&context.plan(&pattern, &problem).unwrap()));
    let alone = c_abi_alone();
    println!("forward of one token: C ABI {alone:.0} ns, Rust {held:.0} ns, with its plan looked up {looked_up:.0} ns");
    assert!(looked_up - alone <= GOAL.max(2.0 * alone)); // under emulation all is slower alike
    assert_eq!(out, [1.0]);
}

/// The same pass with everything prepared.
fn c_abi_alone() -> f64 {
    // SAFETY: zeros are values of all structs, sizes are told, and what pointers point to lives until the end.
    unsafe {
        let mut options: sys::spattn_context_options = std::mem::zeroed();
        options.struct_size = std::mem::size_of_val(&options) as u32;
        (options.device.type_, options.cpu_threads) = (sys::SPATTN_CPU as i32, 1);
        let mut problem: sys::spattn_problem = std::mem::zeroed();
        problem.struct_size = std::mem::size_of_val(&problem) as u32;
        problem.dtype = sys::spattn_dtype { code: sys::SPATTN_FLOAT as u8, bits: 32, lanes: 1 };
        (problem.batch, problem.heads_q, problem.heads_kv) = (1, 1, 1);
        (problem.seq_q, problem.seq_k, problem.head_dim) = (1, 1, 1);
        let (mut context, mut pattern, mut plan) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        assert_eq!(sys::spattn_context_create(&options, &mut context), 0);
        assert_eq!(sys::spattn_pattern_causal(&mut pattern), 0);
        assert_eq!(sys::spattn_plan_create(context, pattern, &problem, std::ptr::null_mut(), &mut plan), 0);

        let (x, mut out, shape, mut scratch) = (1f32, 0f32, [1i64; 4], vec![0u128; 1024]);
        let tensor = |data: *mut f32| sys::spattn_tensor {
            data: data.cast(),
            device: options.device,
            ndim: 4,
            dtype: problem.dtype,
            shape: shape.as_ptr(),
            strides: std::ptr::null(),
            byte_offset: 0,
        };
        let (q, result) = (tensor(std::ptr::addr_of!(x).cast_mut()), tensor(&mut out));
        let mut args: sys::spattn_forward_args = std::mem::zeroed();
        args.struct_size = std::mem::size_of_val(&args) as u32;
        (args.q, args.k, args.v, args.out) = (&q, &q, &q, &result);
        let unaligned = scratch.as_mut_ptr().cast::<u8>();
        args.workspace = unaligned.add(unaligned.align_offset(64)).cast();
        args.workspace_bytes = 1024 * 16 - 64;
        let spent = best(|| assert_eq!(sys::spattn_forward(plan, &args), 0));
        sys::spattn_plan_release(plan);
        sys::spattn_pattern_release(pattern);
        sys::spattn_context_release(context);
        spent
    }
}
