// SPDX-License-Identifier: MIT
//! Passes on NVIDIA GPUs, enqueued on the stream of candle's device as candle's own operations are.
use crate::{
    another_dtype, append_with, backward_with, elsewhere, forward_with, lend, no_integers, view, view_mut, views,
    whole, wrap, Appending, Lent, Pass, Role,
};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage, Tensor};
use sparseattn::{Gradients, Memory, Saved, Stream as _};
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

/// The numbers of an operand beside q, k and v.
enum Beside<'a> {
    I32(CudaView<'a, i32>),
    I64(CudaView<'a, i64>),
    F32(CudaView<'a, f32>),
}

impl<'a> Beside<'a> {
    fn of(role: Role, (storage, layout): Operand<'a>) -> Result<Self> {
        match (role, storage.dtype()) {
            (Role::SinkLogits, _) => Ok(Beside::F32(numbers((storage, layout))?)),
            (_, DType::I32) => Ok(Beside::I32(numbers((storage, layout))?)),
            (_, DType::I64) => Ok(Beside::I64(numbers((storage, layout))?)),
            (_, dtype) => Err(no_integers(role, dtype)),
        }
    }
    fn all(lent: &'a [(Role, Lent)]) -> Result<Vec<Self>> {
        lent.iter().map(|(role, lent)| Self::of(*role, operand(lent)?)).collect()
    }
    fn input(&'a self, stream: &'a Stream) -> Input<'a> {
        match self {
            Beside::I32(numbers) => stream.input(numbers),
            Beside::I64(numbers) => stream.input(numbers),
            Beside::F32(numbers) => stream.input(numbers),
        }
    }
}

fn inputs_of<'a>(beside: &'a [Beside], stream: &'a Stream) -> Vec<Box<dyn Memory + 'a>> {
    beside.iter().map(|numbers| Box::new(numbers.input(stream)) as Box<dyn Memory + 'a>).collect()
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
        let lent = lend(&pass.beside);
        let beside = Beside::all(&lent)?;
        let beside = inputs_of(&beside, &stream);
        let bytes = Shape::from(workspace.len());
        let mut outputs = (stream.output(&mut out), stream.output(&mut lse), stream.output(&mut workspace));
        let (q, k, v) = (view(&inputs[0], q.1)?, view(&inputs[1], k.1)?, view(&inputs[2], v.1)?);
        let call = pass
            .plan
            .forward(q, k, v, whole(&mut outputs.0, &shape)?)
            .lse(whole(&mut outputs.1, &pass.lse_shape)?)
            .workspace(whole(&mut outputs.2, &bytes)?);
        let call = forward_with(call, &views(&beside, &lent)?);
        // SAFETY: all is memory of candle's, which is freed and used again in the order of its stream.
        unsafe { call.enqueue(stream.raw()) }.map_err(wrap)?;
    }
    pass.keep(tensor(lse, device, &pass.lse_shape));
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), shape))
}

/// dq, dk and dv of q, k, v, out, dout and lse, and the gradient of sink logits where there are some.
pub(crate) fn backward<T: Number>(pass: &Pass, lent: &[Lent; 6]) -> Result<([Tensor; 3], Option<Tensor>)> {
    let of = |i: usize| operand(&lent[i]);
    let (q, k, v, out, dout, lse) = (of(0)?, of(1)?, of(2)?, of(3)?, of(4)?, of(5)?);
    let device = q.0.device();
    let stream = stream_of(device).map_err(wrap)?;
    let shapes = [q, k, v].map(|(_, layout)| layout.shape());
    let of = |shape: &Shape| alloc::<T>(device, shape.elem_count());
    let (mut dq, mut dk, mut dv) = (of(shapes[0])?, of(shapes[1])?, of(shapes[2])?);
    let sinks = pass.sinks();
    let mut dsinks = sinks.map(|shape| alloc::<f32>(device, shape.elem_count())).transpose()?;
    let mut workspace = scratch(device, pass, sparseattn::Pass::Backward)?;
    {
        let lent = lend(&pass.beside);
        let beside = Beside::all(&lent)?;
        let beside = inputs_of(&beside, &stream);
        let mut dsink_output = dsinks.as_mut().map(|dsinks| stream.output(dsinks));
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
        let call = pass.plan.backward(saved, view(&inputs[4], dout.1)?, gradients);
        let mut call = backward_with(call.workspace(whole(&mut scratch, &bytes)?), &views(&beside, &lent)?);
        if let (Some(dsinks), Some(shape)) = (&mut dsink_output, sinks) {
            call = call.dsink_logits(whole(dsinks, shape)?);
        }
        // SAFETY: as in forward.
        unsafe { call.enqueue(stream.raw()) }.map_err(wrap)?;
    }
    let dsinks = dsinks.zip(sinks).map(|(dsinks, shape)| tensor(dsinks, device, shape));
    Ok(([tensor(dq, device, shapes[0]), tensor(dk, device, shapes[1]), tensor(dv, device, shapes[2])], dsinks))
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
    let (rows, starts_numbers) = (numbers::<T>(new)?, Beside::of(Role::Starts, starts)?);
    let lent = lend(&call.beside);
    let others = Beside::all(&lent)?;
    let others = inputs_of(&others, &stream);
    let (rows, start_input, mut cache) = (stream.input(&rows), starts_numbers.input(&stream), stream.output(&mut rest));
    let (rows, starts) = (view(&rows, new.1)?, view(&start_input, starts.1)?);
    let append = call.context.append(&call.problem, (rows, None), (view_mut(&mut cache, layout)?, None), starts);
    // SAFETY: as in forward.
    unsafe { append_with(append, &views(&others, &lent)?).enqueue(stream.raw()) }.map_err(wrap)
}
