// SPDX-License-Identifier: MIT
//! A GPU against the CPU. Where there is no GPU, each test says so and passes.
#![cfg(feature = "cuda")]
mod common;
use candle_core::{DType, Device, Result, Tensor, Var};
use sparseattn::*;
use sparseattn_candle::Attention;

const SEQ: usize = 300;

fn gpu() -> Option<Device> {
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
    Some(Device::new_cuda(0).unwrap())
}

fn local() -> Pattern {
    causal() & (window(31, 0) | sink(4))
}

fn random(dims: (usize, usize, usize, usize), dtype: DType) -> Tensor {
    Tensor::randn(0f32, 1.0, dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Tolerances are shares of the largest number.
fn demand_near(what: &str, got: &Tensor, expected: &Tensor, tolerance: f32) -> Result<()> {
    assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()), "{what}");
    let on_cpu = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F32);
    let largest = |x: Tensor| x.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    let (got, expected) = (on_cpu(got)?, on_cpu(expected)?);
    let (farthest, size) = (largest((got - &expected)?)?, largest(expected)?);
    assert!(farthest <= tolerance * size, "{what} is {farthest} away, of {size}"); // NaN, too
    Ok(())
}

/// out, dq, dk and dv, of half the sum of out's squares.
fn both_passes(attention: &Attention, operands: &[Tensor; 3], device: &Device) -> Result<[Tensor; 4]> {
    let [q, k, v] = operands.each_ref().map(|host| Var::from_tensor(&host.to_device(device).unwrap()).unwrap());
    let out = attention.forward(&q, &k, &v)?;
    let gradients = (out.sqr()?.sum_all()? * 0.5)?.backward()?;
    let of = |x: &Var| gradients.get(x).unwrap().clone();
    Ok([out.detach(), of(&q), of(&k), of(&v)])
}

#[test]
fn every_dtype_forward_and_backward() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-6), (DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        let operands = [(2, 4, SEQ, 64), (2, 2, SEQ, 64), (2, 2, SEQ, 48)].map(|dims| random(dims, dtype));
        for softcap in [0.0, 3.0] {
            let attention = Attention::new(local())?.softcap(softcap).scale(0.2);
            let expected = both_passes(&attention, &operands, &Device::Cpu)?;
            let got = both_passes(&attention, &operands, &gpu)?;
            for (i, name) in ["out", "dq", "dk", "dv"].iter().enumerate() {
                demand_near(&format!("{name} of {dtype:?}"), &got[i], &expected[i], tolerance)?;
            }
        }
    }
    Ok(())
}

#[test]
fn parts_of_tensors_in_other_axes() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let whole = random((1, SEQ, 6, 64), DType::BF16);
    let run = |device: &Device, axes| -> Result<[Tensor; 2]> {
        let whole = Var::from_tensor(&whole.to_device(device)?)?;
        let part = |first, heads| whole.narrow(2, first, heads);
        let (mut q, mut k, mut v) = (part(0, 4)?, part(4, 1)?, part(5, 1)?);
        if axes == Axes::Thd {
            (q, k, v) = (q.squeeze(0)?, k.squeeze(0)?, v.squeeze(0)?);
        } else if axes == Axes::Bhsd {
            (q, k, v) = (q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?);
        }
        let out = Attention::new(local())?.axes(axes).forward(&q, &k, &v)?;
        let gradients = out.sqr()?.sum_all()?.backward()?;
        Ok([out.detach(), gradients.get(&whole).unwrap().clone()])
    };
    for axes in [Axes::Bshd, Axes::Bhsd, Axes::Thd] {
        let ([out, gradient], expected) = (run(&gpu, axes)?, run(&Device::Cpu, axes)?);
        demand_near("out", &out, &expected[0], 2e-2)?;
        demand_near("the gradient", &gradient, &expected[1], 2e-2)?;
    }
    Ok(())
}

#[test]
fn sinks_and_lists_of_a_call() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let operands = [(2, 4, SEQ, 64), (2, 2, SEQ, 64), (2, 2, SEQ, 48)].map(|dims| random(dims, DType::F32));
    let run = |device: &Device| -> Result<[Tensor; 5]> {
        let sinks = Var::new(&[0.5f32, -1.0, 2.0, 0.0], device)?;
        let rows: Vec<u32> = (0..SEQ as u32).flat_map(|row| [row, row / 2, row / 3 + 1]).collect();
        let rows = Tensor::from_vec(rows, (1, SEQ, 1, 3), device)?.broadcast_as((2, SEQ, 2, 3))?;
        let attention = Attention::new(causal() & runtime_tokens(3))?.sink_logits(&sinks).lists(&rows, None);
        let [q, k, v] = operands.each_ref().map(|host| Var::from_tensor(&host.to_device(device).unwrap()).unwrap());
        let out = attention.forward(&q, &k, &v)?;
        let gradients = out.sqr()?.sum_all()?.backward()?;
        let of = |x: &Var| gradients.get(x).unwrap().clone();
        Ok([out.detach(), of(&q), of(&k), of(&v), of(&sinks)])
    };
    let (got, expected) = (run(&gpu)?, run(&Device::Cpu)?);
    for (i, name) in ["out", "dq", "dk", "dv", "dsinks"].iter().enumerate() {
        demand_near(name, &got[i], &expected[i], 1e-4)?;
    }
    Ok(())
}

#[test]
fn decoding_on_a_cache() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 2e-2)] {
        let operands = [(2, 4, 100, 64), (2, 2, 100, 64), (2, 2, 100, 64)].map(|dims| random(dims, dtype));
        let attention = Attention::new(local())?;
        let whole = attention.forward(&operands[0], &operands[1], &operands[2])?;
        let operands = operands.map(|x| x.to_device(&gpu).unwrap());
        for axes in [Axes::Bhsd, Axes::Bshd] {
            for paged in [false, true] {
                let out = common::decode(attention.clone(), &operands, &gpu, axes, paged)?;
                demand_near("out", &out, &whole, tolerance)?;
            }
        }
    }
    Ok(())
}

#[test]
fn memory_is_used_again_in_order() -> Result<()> {
    // What a call was given and its scratch are freed while the GPU has only heard of it.
    let Some(gpu) = gpu() else { return Ok(()) };
    let attention = Attention::new(local())?;
    let x = random((1, 8, 4096, 64), DType::F32);
    let expected = attention.forward(&x, &x, &x)?.sum_all()?.to_scalar::<f32>()?;
    let sums: Vec<Tensor> = (0..50)
        .map(|_| {
            let x = x.to_device(&gpu)?;
            attention.clone().forward(&x, &x, &x)?.sum_all()
        })
        .collect::<Result<_>>()?;
    for sum in sums {
        let sum = sum.to_scalar::<f32>()?;
        assert!((sum - expected).abs() <= 1e-3 * expected.abs() + 1.0, "{sum}, expected {expected}");
    }
    Ok(())
}

#[test]
fn wrong_operands_are_errors() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let (q, k) = (random((1, 4, SEQ, 64), DType::F32), random((1, 3, SEQ, 64), DType::F32).to_device(&gpu)?);
    let attention = Attention::new(local())?;
    let text = |result: Result<Tensor>| result.err().unwrap().to_string();
    assert!(text(attention.forward(&q.to_device(&gpu)?, &k, &k)).contains("heads_kv"));
    assert!(text(attention.forward(&q, &q.to_device(&gpu)?, &q)).contains("device"));
    // and what comes after is right
    let q = q.to_device(&gpu)?;
    let empty = q.narrow(2, 0, 0)?;
    assert_eq!(attention.forward(&empty, &empty, &empty)?.dims(), [1, 4, 0, 64]);
    let on_cpu = q.to_device(&Device::Cpu)?;
    demand_near("out", &attention.forward(&q, &q, &q)?, &attention.forward(&on_cpu, &on_cpu, &on_cpu)?, 1e-5)
}
