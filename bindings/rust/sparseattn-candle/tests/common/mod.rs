// SPDX-License-Identifier: MIT
use candle_core::{Device, Result, Tensor};
use sparseattn::Axes;
use sparseattn_candle::Attention;

const PAGE: usize = 8;

/// A prompt, then token after token, come to a cache that was never written, whole or in pages, and their queries read
/// it. q, k and v are whole sequences in `Axes::Bhsd`.
pub fn decode(
    attention: Attention,
    [q, k, v]: &[Tensor; 3],
    device: &Device,
    axes: Axes,
    paged: bool,
) -> Result<Tensor> {
    let attention = attention.axes(axes);
    let (batch, _, seq, _) = q.dims4()?;
    let (_, heads_kv, _, _) = k.dims4()?;
    let turned = |x: Tensor| if axes == Axes::Bshd { x.transpose(1, 2) } else { Ok(x) };
    let pages = seq.div_ceil(PAGE); // of a sequence
    let cache = |like: &Tensor| {
        let dim = like.dims4()?.3;
        let shape = if paged { (batch * pages + 1, heads_kv, PAGE, dim) } else { (batch, heads_kv, pages * PAGE, dim) };
        turned(Tensor::full(f32::NAN, shape, device)?.to_dtype(like.dtype())?)?.force_contiguous()
    };
    let (keys, values) = (cache(k)?, cache(v)?);
    let backwards: Vec<i32> = (1..=(batch * pages) as i32).rev().collect();
    let table = Tensor::from_vec(backwards, (batch, pages), device)?;
    let table = paged.then_some(&table);
    let prompt = seq / 2;
    let mut results = Vec::new();
    for (first, count) in std::iter::once((0, prompt)).chain((prompt..seq).map(|token| (token, 1))) {
        let starts = Tensor::from_vec(vec![first as i64; batch], batch, device)?;
        let new = |x: &Tensor| turned(x.narrow(2, first, count)?);
        attention.append(&new(k)?, &keys, &starts, table)?;
        attention.append(&new(v)?, &values, &starts, table)?;
        results.push(turned(attention.decode(&new(q)?, &keys, &values, &starts, table)?)?);
    }
    Tensor::cat(&results, 2)
}
