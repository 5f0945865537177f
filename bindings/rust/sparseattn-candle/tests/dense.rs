// SPDX-License-Identifier: MIT
//! Against dense attention with a mask, which candle differentiates itself.
mod common;
use candle_core::{DType, Device, Result, Tensor, Var};
use sparseattn::*;
use sparseattn_candle::Attention;

const SEQ: usize = 40;

fn open() {
    #[cfg(feature = "load")]
    {
        let path = std::env::var_os("SPARSEATTN_LIBRARY").map(std::path::PathBuf::from);
        // SAFETY: who runs the tests says which library.
        unsafe { load(path.as_deref()).unwrap() };
    }
}

fn local() -> Pattern {
    causal() & (window(7, 0) | sink(2))
}

/// The same by candle alone: `[batch, heads, seq, head_dim]`, as many heads of keys as of queries.
fn dense(pattern: &Pattern, q: &Tensor, k: &Tensor, v: &Tensor, softcap: f64) -> Result<Tensor> {
    let scale = 1.0 / (q.dims()[3] as f64).sqrt();
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? * scale)?;
    if softcap > 0.0 {
        scores = ((scores / softcap)?.tanh()? * softcap)?;
    }
    let mask = Tensor::from_vec(pattern.to_mask(SEQ).unwrap(), (1, 1, SEQ, SEQ), &Device::Cpu)?;
    let weights = scores.exp()?.broadcast_mul(&mask.to_dtype(scores.dtype())?)?; // small scores need no maximum
    weights.broadcast_div(&weights.sum_keepdim(3)?)?.matmul(v)
}

fn random(dims: (usize, usize, usize, usize)) -> Var {
    Var::randn(0f64, 1.0, dims, &Device::Cpu).unwrap()
}

fn demand_near(a: &Tensor, b: &Tensor, tolerance: f64) {
    assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
    let farthest = (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
    let farthest = farthest.to_dtype(DType::F64).unwrap().to_scalar::<f64>().unwrap();
    assert!(farthest <= tolerance, "{farthest} away");
}

#[test]
fn gradients_are_those_of_dense_attention() -> Result<()> {
    open();
    let (q, k, v) = (random((2, 3, SEQ, 8)), random((2, 3, SEQ, 8)), random((2, 3, SEQ, 5)));
    let weights = random((2, 3, SEQ, 5));
    for softcap in [0.0, 2.0] {
        let out = Attention::new(local())?.softcap(softcap).forward(&q, &k, &v)?;
        let truth = dense(&local(), &q, &k, &v, softcap)?;
        demand_near(&out, &truth, 1e-9);
        let (got, expected) = (
            (out * weights.as_tensor())?.sum_all()?.backward()?,
            (truth * weights.as_tensor())?.sum_all()?.backward()?,
        );
        for operand in [&q, &k, &v] {
            demand_near(got.get(operand).unwrap(), expected.get(operand).unwrap(), 1e-6);
            // lse is f32
        }
    }
    Ok(())
}

#[test]
fn grouped_heads_and_a_gradient_without_memory_of_its_own() -> Result<()> {
    open();
    let (q, k, v) = (random((1, 4, SEQ, 8)), random((1, 2, SEQ, 8)), random((1, 2, SEQ, 8)));
    let twice = |x: &Var| x.unsqueeze(2)?.broadcast_as((1, 2, 2, SEQ, 8))?.reshape((1, 4, SEQ, 8));
    let got = Attention::new(local())?.forward(&q, &k, &v)?.sum_all()?.backward()?;
    let expected = dense(&local(), &q, &twice(&k)?, &twice(&v)?, 0.0)?.sum_all()?.backward()?;
    for operand in [&q, &k, &v] {
        demand_near(got.get(operand).unwrap(), expected.get(operand).unwrap(), 1e-6);
    }
    Ok(())
}

#[test]
fn other_axes_strides_and_parts() -> Result<()> {
    open();
    let whole = random((1, 2, SEQ, 24));
    let parts = whole.chunk(3, 3)?; // q, k and v side by side
    let (q, k, v) = (&parts[0], &parts[1], &parts[2]);
    let truth = dense(&local(), &q.contiguous()?, &k.contiguous()?, &v.contiguous()?, 0.0)?;
    demand_near(&Attention::new(local())?.forward(q, k, v)?, &truth, 1e-9);

    let swap = |x: &Tensor| x.transpose(1, 2);
    let out = Attention::new(local())?.axes(Axes::Bshd).forward(&swap(q)?, &swap(k)?, &swap(v)?)?;
    demand_near(&swap(&out)?, &truth, 1e-9);
    let packed = |x: &Tensor| swap(x)?.squeeze(0);
    let out = Attention::new(local())?.axes(Axes::Thd).forward(&packed(q)?, &packed(k)?, &packed(v)?)?;
    demand_near(&swap(&out.unsqueeze(0)?)?, &truth, 1e-9);

    let got = out.sqr()?.sum_all()?.backward()?;
    let expected = truth.sqr()?.sum_all()?.backward()?;
    demand_near(got.get(&whole).unwrap(), expected.get(&whole).unwrap(), 1e-6);
    Ok(())
}

#[test]
fn every_dtype() -> Result<()> {
    open();
    let x = random((1, 2, SEQ, 16));
    let truth = Attention::new(local())?.forward(&x, &x, &x)?;
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 5e-3), (DType::BF16, 4e-2)] {
        let x = Var::from_tensor(&x.to_dtype(dtype)?)?;
        let out = Attention::new(local())?.forward(&x, &x, &x)?;
        demand_near(&out.to_dtype(DType::F64)?, &truth, tolerance);
        assert_eq!(out.sum_all()?.backward()?.get(&x).unwrap().dtype(), dtype);
    }
    Ok(())
}

#[test]
fn decoding_on_a_cache() -> Result<()> {
    open();
    let operands = [(2, 4, SEQ, 8), (2, 2, SEQ, 8), (2, 2, SEQ, 5)].map(|dims| random(dims).as_detached_tensor());
    let attention = Attention::new(local())?.softcap(3.0).scale(0.5);
    let whole = attention.forward(&operands[0], &operands[1], &operands[2])?;
    for axes in [Axes::Bhsd, Axes::Bshd] {
        for paged in [false, true] {
            let out = common::decode(attention.clone(), &operands, &Device::Cpu, axes, paged)?;
            demand_near(&out, &whole, 1e-9);
        }
    }
    Ok(())
}

#[test]
fn wrong_calls_on_a_cache_are_errors() -> Result<()> {
    open();
    let attention = Attention::new(local())?;
    let (q, cache) = (random((2, 2, 3, 8)), random((2, 2, SEQ, 8)));
    let starts = Tensor::new(&[0i64, 5], &Device::Cpu)?;
    let text = |result: Result<Tensor>| result.err().unwrap().to_string();
    let out = attention.decode(&q, &cache, &cache, &starts, None)?;
    assert!(text(out.sum_all()?.backward().map(|_| out.clone())).contains("decode"));
    let decode = |attention: &Attention, q: &Tensor, starts: &Tensor, table: Option<&Tensor>| {
        text(attention.decode(q, &cache, &cache, starts, table))
    };
    assert!(decode(&attention, &q, &starts.to_dtype(DType::F32)?, None).contains("F32"));
    assert!(decode(&attention, &q, &starts.narrow(0, 0, 1)?, None).contains("starts"));
    assert!(decode(&attention, &q, &starts, Some(&starts)).contains("rank"));
    assert!(decode(&attention, &q.to_dtype(DType::F32)?, &starts, None).contains("dtype"));
    assert!(decode(&attention.clone().axes(Axes::Thd), &q, &starts, None).contains("Thd"));
    let append = |new: &Tensor, cache: &Tensor, starts: &Tensor| {
        attention.append(new, cache, starts, None).err().unwrap().to_string()
    };
    assert!(append(&q, &cache.to_dtype(DType::F32)?, &starts).contains("F32"));
    assert!(append(&q, &cache, &starts.to_dtype(DType::U8)?).contains("U8"));
    assert!(append(&q, &cache.narrow(3, 0, 4)?, &starts).contains("k has shape"));
    Ok(())
}

#[test]
fn wrong_operands_are_errors() -> Result<()> {
    open();
    let (q, k) = (random((1, 4, SEQ, 8)), random((1, 3, SEQ, 8)));
    let attention = Attention::new(local())?;
    let text = |result: Result<Tensor>| result.err().unwrap().to_string();
    assert!(text(attention.forward(&q, &k, &k)).contains("heads_kv"));
    assert!(text(attention.forward(&q, &q.to_dtype(DType::F32)?, &q)).contains("dtype"));
    assert!(text(attention.forward(&q, &q, &q.narrow(2, 0, 7)?)).contains('v'));
    assert!(text(attention.forward(&q.flatten(0, 1)?, &q, &q)).contains("rank"));
    assert!(text(attention.forward(&q.to_dtype(DType::U8)?, &q, &q)).contains("U8"));
    assert!(Attention::new(window(-2, 0)).is_err());
    Ok(())
}
