// SPDX-License-Identifier: MIT
//! Passes on NVIDIA GPUs, enqueued on the stream of candle's device as candle's own operations are.
use crate::{
    another_dtype, elsewhere, lend, no_integers, on_cache, view, view_mut, whole, wrap, Appending, Lent, Pass,
};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage, Tensor};
use sparseattn::{Gradients, Saved, Stream as _};
use sparseattn_cudarc::{DeviceElement, Input, Stream};

type Operand<'a> = (&'a CudaStorage, &'a Layout);

/// A number that tensors of operands may have.
pub(crate) trait Number: CudaDType + DeviceElement + DeviceRepr {}
impl<T: CudaDType + DeviceElement + DeviceRepr> Number for T {}

pub(crate) fn stream_of(device: &CudaDevice) -> sparseattn::Result<Stream> {
    Stream::new(&device.cuda_stream())
}

/// Memory that a pass writes.
fn alloc<T: DeviceRepr>(device: &CudaDevice, elements: usize) -> Result<CudaSlice<T>> {
    // SAFETY: a pass writes all of its results, and reads of its scratch what it wrote. CUDA has nothing of 0 bytes.
    unsafe { device.alloc(elements.max(1)) }
}

fn scratch(device: &CudaDevice, pass: &Pass, of: sparseattn::Pass) -> Result<CudaSlice<u8>> {
    let (bytes, _) = pass.plan.workspace(of).map_err(wrap)?; // CUDA aligns more than any kernel asks
    alloc(device, bytes)
}

/// Numbers of a tensor, from its first one on.
fn numbers<T: Number>((storage, layout): Operand<'_>) -> Result<CudaView<'_, T>> {
    let all = storage.as_cuda_slice::<T>()?;
    Ok(all.slice(layout.start_offset().min(all.len())..))
}

fn operand<'a>((storage, layout): &'a Lent) -> Result<Operand<'a>> {
    match &**storage {
        Storage::Cuda(storage) => Ok((storage, layout)),
        _ => Err(elsewhere()),
    }
}

enum Integers<'a> {
    I32(CudaView<'a, i32>),
    I64(CudaView<'a, i64>),
}

impl<'a> Integers<'a> {
    fn of((storage, layout): Operand<'a>) -> Result<Self> {
        match storage.dtype() {
            DType::I32 => Ok(Integers::I32(numbers((storage, layout))?)),
            DType::I64 => Ok(Integers::I64(numbers((storage, layout))?)),
            dtype => Err(no_integers(dtype)),
        }
    }
    fn input(&'a self, stream: &'a Stream) -> Input<'a> {
        match self {
            Integers::I32(numbers) => stream.input(numbers),
            Integers::I64(numbers) => stream.input(numbers),
        }
    }
}

fn tensor<T: Number>(numbers: CudaSlice<T>, device: &CudaDevice, shape: &Shape) -> Tensor {
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(numbers, device.clone()));
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

pub(crate) fn forward<T: Number>(pass: &Pass, [q, k, v]: [Operand; 3]) -> Result<(CudaStorage, Shape)> {
    let device = q.0.device();
    let stream = stream_of(device).map_err(wrap)?;
    let shape = pass.shape(q.1);
    let mut out = alloc::<T>(device, shape.elem_count())?;
    let mut lse = alloc::<f32>(device, pass.lse_shape.elem_count())?;
    let mut workspace = scratch(device, pass, sparseattn::Pass::Forward)?;
    {
        let numbers = [numbers::<T>(q)?, numbers(k)?, numbers(v)?];
        let inputs = numbers.each_ref().map(|numbers| stream.input(numbers));
        let lent = lend(&pass.place);
        let place = lent.iter().map(|lent| Integers::of(operand(lent)?)).collect::<Result<Vec<_>>>()?;
        let place: Vec<_> = place.iter().map(|numbers| numbers.input(&stream)).collect();
        let place = place.iter().zip(&lent).map(|(input, (_, layout))| view(input, layout));
        let bytes = Shape::from(workspace.len());
        let mut outputs = (stream.output(&mut out), stream.output(&mut lse), stream.output(&mut workspace));
        let (q, k, v) = (view(&inputs[0], q.1)?, view(&inputs[1], k.1)?, view(&inputs[2], v.1)?);
        let call = pass
            .plan
            .forward(q, k, v, whole(&mut outputs.0, &shape)?)
            .lse(whole(&mut outputs.1, &pass.lse_shape)?)
            .workspace(whole(&mut outputs.2, &bytes)?);
        let call = on_cache(call, &place.collect::<Result<Vec<_>>>()?);
        // SAFETY: all is memory of candle's, which is freed and used again in the order of its stream.
        unsafe { call.enqueue(stream.raw()) }.map_err(wrap)?;
    }
    pass.keep(tensor(lse, device, &pass.lse_shape));
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), shape))
}

/// dq, dk and dv of q, k, v, out, dout and lse.
pub(crate) fn backward<T: Number>(pass: &Pass, lent: &[Lent; 6]) -> Result<[Tensor; 3]> {
    let of = |i: usize| operand(&lent[i]);
    let (q, k, v, out, dout, lse) = (of(0)?, of(1)?, of(2)?, of(3)?, of(4)?, of(5)?);
    let device = q.0.device();
    let stream = stream_of(device).map_err(wrap)?;
    let shapes = [q, k, v].map(|(_, layout)| layout.shape());
    let of = |shape: &Shape| alloc::<T>(device, shape.elem_count());
    let (mut dq, mut dk, mut dv) = (of(shapes[0])?, of(shapes[1])?, of(shapes[2])?);
    let mut workspace = scratch(device, pass, sparseattn::Pass::Backward)?;
    {
        let numbers_of = [numbers::<T>(q)?, numbers(k)?, numbers(v)?, numbers(out)?, numbers(dout)?];
        let inputs = numbers_of.each_ref().map(|numbers| stream.input(numbers));
        let lse_numbers = numbers::<f32>(lse)?;
        let lse_input = stream.input(&lse_numbers);
        let bytes = Shape::from(workspace.len());
        let (mut dq, mut dk, mut dv) = (stream.output(&mut dq), stream.output(&mut dk), stream.output(&mut dv));
        let mut scratch = stream.output(&mut workspace);
        let saved = Saved {
            q: view(&inputs[0], q.1)?,
            k: view(&inputs[1], k.1)?,
            v: Some(view(&inputs[2], v.1)?),
            out: view(&inputs[3], out.1)?,
            lse: view(&lse_input, lse.1)?,
        };
        let gradients = Gradients {
            dq: whole(&mut dq, shapes[0])?,
            dk: whole(&mut dk, shapes[1])?,
            dv: Some(whole(&mut dv, shapes[2])?),
        };
        let enqueued = pass.plan.backward(saved, view(&inputs[4], dout.1)?, gradients);
        // SAFETY: as in forward.
        unsafe { enqueued.workspace(whole(&mut scratch, &bytes)?).enqueue(stream.raw()) }.map_err(wrap)?;
    }
    Ok([tensor(dq, device, shapes[0]), tensor(dk, device, shapes[1]), tensor(dv, device, shapes[2])])
}

pub(crate) fn append<T: Number>(
    call: &Appending,
    (cache, layout): (&mut CudaStorage, &Layout),
    [new, starts]: [Operand; 2],
) -> Result<()> {
    let dtype = cache.dtype();
    let stream = stream_of(cache.device()).map_err(wrap)?;
    let all = cache.as_cuda_slice_mut::<T>().map_err(|_| another_dtype(dtype))?;
    let mut rest = all.slice_mut(layout.start_offset().min(all.len())..);
    let (rows, starts_numbers) = (numbers::<T>(new)?, Integers::of(starts)?);
    let lent = lend(&call.page_table);
    let table = lent.iter().map(|lent| Integers::of(operand(lent)?)).collect::<Result<Vec<_>>>()?;
    let table: Vec<_> = table.iter().map(|numbers| numbers.input(&stream)).collect();
    let (rows, start_input, mut cache) = (stream.input(&rows), starts_numbers.input(&stream), stream.output(&mut rest));
    let (rows, starts) = (view(&rows, new.1)?, view(&start_input, starts.1)?);
    let mut append = call.context.append(&call.problem, (rows, None), (view_mut(&mut cache, layout)?, None), starts);
    for (input, (_, layout)) in table.iter().zip(&lent) {
        append = append.page_table(view(input, layout)?);
    }
    // SAFETY: as in forward.
    unsafe { append.enqueue(stream.raw()) }.map_err(wrap)
}
