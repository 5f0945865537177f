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

/// Each row has one more score, without a value.
fn dense_with_sinks(q: &Tensor, k: &Tensor, v: &Tensor, sinks: &Tensor) -> Result<Tensor> {
    let (batch, heads, _, _) = q.dims4()?;
    let scores = (q.matmul(&k.t()?.contiguous()?)? * (1.0 / (q.dims()[3] as f64).sqrt()))?;
    let mask = Tensor::from_vec(local().to_mask(SEQ).unwrap(), (1, 1, SEQ, SEQ), &Device::Cpu)?;
    let weights = scores.exp()?.broadcast_mul(&mask.to_dtype(scores.dtype())?)?;
    let sinks = sinks.reshape((1, heads, 1, 1))?.broadcast_as((batch, heads, SEQ, 1))?.exp()?;
    weights.broadcast_div(&(weights.sum_keepdim(3)? + sinks)?)?.matmul(v)
}

#[test]
fn sinks_and_their_gradient() -> Result<()> {
    open();
    let (q, k, v, weights) =
        (random((2, 3, SEQ, 8)), random((2, 3, SEQ, 8)), random((2, 3, SEQ, 5)), random((2, 3, SEQ, 5)));
    let sinks = Var::new(&[0.5f64, -1.0, 2.0], &Device::Cpu)?;
    let attention = Attention::new(local())?.sink_logits(&sinks);
    let truth = dense_with_sinks(&q, &k, &v, &sinks)?;
    let expected = (&truth * weights.as_tensor())?.sum_all()?.backward()?;
    let swap = |x: &Tensor| x.transpose(1, 2);
    for axes in [Axes::Bhsd, Axes::Bshd] {
        let turned = |x: &Tensor| if axes == Axes::Bshd { swap(x) } else { Ok(x.clone()) };
        let out = turned(&attention.clone().axes(axes).forward(&turned(&q)?, &turned(&k)?, &turned(&v)?)?)?;
        demand_near(&out, &truth, 1e-6);
        let loss = (out * weights.as_tensor())?.sum_all()?;
        for got in [loss.backward()?, loss.backward()?] {
            for operand in [&q, &k, &v, &sinks] {
                demand_near(got.get(operand).unwrap(), expected.get(operand).unwrap(), 1e-5);
            }
        }
    }
    // Sinks alone may learn, and those that do not learn change nothing for the others.
    let [q, k, v] = [&q, &k, &v].map(|operand| operand.as_detached_tensor());
    let got = (attention.forward(&q, &k, &v)? * weights.as_tensor())?.sum_all()?.backward()?;
    demand_near(got.get(&sinks).unwrap(), expected.get(&sinks).unwrap(), 1e-5);
    let fixed = Attention::new(local())?.sink_logits(&sinks.to_dtype(DType::BF16)?.detach());
    demand_near(&fixed.forward(&q, &k, &v)?, &truth, 1e-6); // these numbers are bfloat16, too
    Ok(())
}

#[test]
fn lists_of_a_call() -> Result<()> {
    open();
    let (q, k, v) = (random((2, 4, SEQ, 8)), random((2, 2, SEQ, 8)), random((2, 2, SEQ, 8)));
    let expected = Attention::new(causal() & window(3, 0))?.forward(&q, &k, &v)?;
    // The window's own keys, those that do not exist beyond the counts: as u32, they have no -1.
    let rows: Vec<u32> = (0..SEQ as u32).flat_map(|row| (0..4).map(move |i| row.saturating_sub(i))).collect();
    let counts: Vec<u32> = (1..=SEQ as u32).map(|keys| keys.min(4)).collect();
    let indices = Tensor::from_vec(rows, (1, SEQ, 1, 4), &Device::Cpu)?.broadcast_as((2, SEQ, 2, 4))?;
    let counts = Tensor::from_vec(counts, (1, SEQ, 1), &Device::Cpu)?.broadcast_as((2, SEQ, 2))?;
    let listed = Attention::new(runtime_tokens(4))?.lists(&indices, Some(&counts));
    let out = listed.forward(&q, &k, &v)?;
    demand_near(&out, &expected, 1e-9);
    let (got, expected) = (out.sqr()?.sum_all()?.backward()?, expected.sqr()?.sum_all()?.backward()?);
    for operand in [&q, &k, &v] {
        demand_near(got.get(operand).unwrap(), expected.get(operand).unwrap(), 1e-6);
    }
    Ok(())
}

#[test]
fn decoding_packed_rows_with_sinks() -> Result<()> {
    open();
    let [q, k, v] = [(2, 4, SEQ, 8), (2, 2, SEQ, 8), (2, 2, SEQ, 5)].map(|dims| random(dims).as_detached_tensor());
    let sinks = Tensor::new(&[0.5f32, -1.0, 2.0, 0.0], &Device::Cpu)?;
    let whole = Attention::new(local())?.sink_logits(&sinks).forward(&q, &k, &v)?;
    let attention = Attention::new(local())?.sink_logits(&sinks).axes(Axes::Thd);
    let pages = |dim| Tensor::full(f64::NAN, (10, 8, 2, dim), &Device::Cpu);
    let (keys, values) = (pages(8)?, pages(5)?);
    let table = Tensor::from_vec((0..10i32).rev().collect(), (2, 5), &Device::Cpu)?;
    // Each call brings as many tokens of each sequence as it likes.
    let mut begins = [0i64, 0];
    for counts in [[1usize, 3], [30, 1], [9, 36]] {
        let rows = |x: &Tensor| {
            let of = |entry: usize| x.get(entry)?.transpose(0, 1)?.narrow(0, begins[entry] as usize, counts[entry]);
            Tensor::cat(&[of(0)?, of(1)?], 0)
        };
        let starts = Tensor::new(&begins, &Device::Cpu)?;
        let offsets = Tensor::new(&[0i64, counts[0] as i64, (counts[0] + counts[1]) as i64], &Device::Cpu)?;
        let attention = attention.clone().query_offsets(&offsets);
        attention.append(&rows(&k)?, &keys, &starts, Some(&table))?;
        attention.append(&rows(&v)?, &values, &starts, Some(&table))?;
        let out = attention.decode(&rows(&q)?, &keys, &values, &starts, Some(&table))?;
        demand_near(&out, &rows(&whole)?, 1e-9);
        (0..2).for_each(|entry| begins[entry] += counts[entry] as i64);
    }
    assert_eq!(begins, [SEQ as i64; 2]);
    Ok(())
}

#[test]
fn queries_from_anywhere() -> Result<()> {
    open();
    let (q, k) = (random((1, 2, SEQ, 8)), random((1, 2, SEQ, 8)));
    let whole = Attention::new(local())?.forward(&q, &k, &k)?;
    let attention = Attention::new(local())?.q_offset(5).deterministic(true).tf32(true);
    demand_near(&attention.forward(&q.narrow(2, 5, 9)?, &k, &k)?, &whole.narrow(2, 5, 9)?, 1e-9);
    Ok(())
}

#[test]
fn drafts_are_nodes_of_trees() -> Result<()> {
    open();
    let parents = [-1i64, 0, 0, -1, 2, 1]; // drafts behind the text
    let text = SEQ - parents.len();
    let (q, k, v) = (random((1, 4, parents.len(), 8)), random((1, 2, SEQ, 8)), random((1, 2, SEQ, 8)));
    let expected = Attention::new(tree(&parents))?.forward(&q, &k, &v)?;
    let (starts, parents) = (Tensor::new(&[text as i64], &Device::Cpu)?, Tensor::new(&[parents], &Device::Cpu)?);
    let attention = Attention::new(full())?.parents(&parents);
    demand_near(&attention.decode(&q, &k, &v, &starts, None)?, &expected, 1e-9);
    assert!(attention.forward(&q, &k, &v).err().unwrap().to_string().contains("parents"));
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
    assert!(decode(&attention, &q.flatten(0, 1)?, &starts, None).contains("q has shape [4, 3, 8]"));
    assert!(decode(&attention, &q.to_dtype(DType::F32)?, &starts, None).contains("dtype"));
    let packed = attention.clone().axes(Axes::Thd);
    assert!(decode(&packed, &q, &starts, None).contains("Thd"));
    let rows = random((1, 3, SEQ, 8)).squeeze(0)?; // as many heads as this cache has in Axes::Thd
    assert!(decode(&packed, &rows, &starts, None).contains("page_size"));
    assert!(decode(&attention.clone().query_offsets(&starts), &q, &starts, None).contains("query_offsets"));
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
    assert!(text(attention.forward(&q, &q.to_dtype(DType::F32)?, &q)).contains("k is of dtype F32"));
    assert!(text(attention.forward(&q, &q, &q.to_dtype(DType::F16)?)).contains("v is of dtype F16"));
    assert!(text(attention.forward(&q, &q, &q.narrow(2, 0, 7)?)).contains('v'));
    assert!(text(attention.forward(&q.flatten(0, 1)?, &q, &q)).contains("q has shape [4, 40, 8]"));
    assert!(text(attention.forward(&q, &q, &q.squeeze(0)?)).contains("v has shape"));
    assert!(text(attention.forward(&q.to_dtype(DType::U8)?, &q, &q)).contains("U8"));
    assert!(Attention::new(window(-2, 0)).is_err());
    let sinks = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
    assert!(text(attention.clone().sink_logits(&sinks).forward(&q, &q, &q)).contains("sink_logits has shape [3]"));
    let lists = Tensor::zeros((1, SEQ, 4, 2), DType::I64, &Device::Cpu)?;
    assert!(text(attention.lists(&lists, None).forward(&q, &q, &q)).contains("indices"));
    let lists = lists.to_dtype(DType::F32)?;
    assert!(
        text(Attention::new(runtime_tokens(2))?.lists(&lists, None).forward(&q, &q, &q)).contains("indices is of F32")
    );
    assert!(text(Attention::new(runtime_tokens(2))?.forward(&q, &q, &q)).contains("indices"));
    Ok(())
}
