// SPDX-License-Identifier: MIT
//! Passes on the CPU, in candle's vectors.
use crate::{
    another_dtype, append_with, backward_with, elsewhere, forward_with, lend, no_integers, view, view_mut, views,
    whole, wrap, Appending, Lent, Pass, Role,
};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Device, Layout, Result, Shape, Storage, Tensor, WithDType};
use sparseattn::{Dtype, Gradients, Memory, MemoryMut, Saved};
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};

type Operand<'a> = (&'a CpuStorage, &'a Layout);

/// A number that tensors of operands may have.
pub(crate) trait Number: WithDType {
    const CALLED: Dtype;
    /// All that a storage has of these.
    fn all_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! numbers {
    ($($type:ty: $called:ident,)*) => { $(
        impl Number for $type {
            const CALLED: Dtype = Dtype::$called;
            fn all_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$called(all) => Some(all),
                    _ => None,
                }
            }
        }
    )* };
}
numbers! { f32: F32, f64: F64, half::f16: F16, half::bf16: BF16, i32: I32, i64: I64, }

/// Numbers of a tensor, from its first one on, or those of a result.
struct Numbers<C>(C);

// SAFETY: slices and vectors are what the trait describes.
unsafe impl<T: Number, C: Deref<Target = [T]>> Memory for Numbers<C> {
    fn as_ptr(&self) -> *const c_void {
        self.0.deref().as_ptr().cast()
    }
    fn elements(&self) -> usize {
        self.0.len()
    }
    fn dtype(&self) -> Dtype {
        T::CALLED
    }
    fn device(&self) -> sparseattn::Device {
        sparseattn::Device::Cpu
    }
}
// SAFETY: as above.
unsafe impl<T: Number, C: DerefMut<Target = [T]>> MemoryMut for Numbers<C> {
    fn as_mut_ptr(&mut self) -> *mut c_void {
        self.0.deref_mut().as_mut_ptr().cast()
    }
}

impl<'a, T: Number> Numbers<&'a [T]> {
    fn of((storage, layout): Operand<'a>) -> Result<Self> {
        let all = storage.as_slice::<T>()?;
        Ok(Numbers(all.get(layout.start_offset()..).unwrap_or_default()))
    }
}

fn operand<'a>((storage, layout): &'a Lent) -> Result<Operand<'a>> {
    match &**storage {
        Storage::Cpu(storage) => Ok((storage, layout)),
        _ => Err(elsewhere()),
    }
}

/// The numbers of an operand beside q, k and v.
fn beside<'a>(role: Role, (storage, layout): Operand<'a>) -> Result<Box<dyn Memory + 'a>> {
    match (role, storage) {
        (Role::SinkLogits, _) => Ok(Box::new(Numbers::<&[f32]>::of((storage, layout))?)),
        (_, CpuStorage::I32(_)) => Ok(Box::new(Numbers::<&[i32]>::of((storage, layout))?)),
        (_, CpuStorage::I64(_)) => Ok(Box::new(Numbers::<&[i64]>::of((storage, layout))?)),
        _ => Err(no_integers(role, storage.dtype())),
    }
}

fn all_beside<'a>(lent: &'a [(Role, Lent)]) -> Result<Vec<Box<dyn Memory + 'a>>> {
    lent.iter().map(|(role, lent)| beside(*role, operand(lent)?)).collect()
}

impl<T: Number> Numbers<Vec<T>> {
    fn zeros(shape: &Shape) -> Self {
        Numbers(vec![T::zero(); shape.elem_count()])
    }
    fn tensor(self, shape: &Shape) -> Result<Tensor> {
        Tensor::from_vec(self.0, shape, &Device::Cpu)
    }
}

pub(crate) fn forward<T: Number>(pass: &Pass, [q, k, v]: [Operand; 3]) -> Result<(CpuStorage, Shape)> {
    let shape = pass.shape(q.1);
    let (mut out, mut lse) = (Numbers::<Vec<T>>::zeros(&shape), Numbers::<Vec<f32>>::zeros(&pass.lse_shape));
    let numbers = [Numbers::<&[T]>::of(q)?, Numbers::of(k)?, Numbers::of(v)?];
    let lent = lend(&pass.beside);
    let beside = all_beside(&lent)?;
    let (q, k, v) = (view(&numbers[0], q.1)?, view(&numbers[1], k.1)?, view(&numbers[2], v.1)?);
    let call = pass.plan.forward(q, k, v, whole(&mut out, &shape)?).lse(whole(&mut lse, &pass.lse_shape)?);
    forward_with(call, &views(&beside, &lent)?).run().map_err(wrap)?;
    pass.keep(lse.tensor(&pass.lse_shape)?);
    Ok((T::to_cpu_storage_owned(out.0), shape))
}

/// dq, dk and dv of q, k, v, out, dout and lse, and the gradient of sink logits where there are some.
pub(crate) fn backward<T: Number>(pass: &Pass, lent: &[Lent; 6]) -> Result<([Tensor; 3], Option<Tensor>)> {
    let of = |i: usize| operand(&lent[i]);
    let (q, k, v, out, dout, lse) = (of(0)?, of(1)?, of(2)?, of(3)?, of(4)?, of(5)?);
    let shapes = [q, k, v].map(|(_, layout)| layout.shape());
    let [mut dq, mut dk, mut dv] = shapes.map(Numbers::<Vec<T>>::zeros);
    let of = Numbers::<&[T]>::of;
    let (numbers, lse_numbers) = ([of(q)?, of(k)?, of(v)?, of(out)?, of(dout)?], Numbers::<&[f32]>::of(lse)?);
    let saved = Saved {
        q: view(&numbers[0], q.1)?,
        k: view(&numbers[1], k.1)?,
        v: Some(view(&numbers[2], v.1)?),
        out: view(&numbers[3], out.1)?,
        lse: view(&lse_numbers, lse.1)?,
    };
    let gradients = Gradients {
        dq: whole(&mut dq, shapes[0])?,
        dk: whole(&mut dk, shapes[1])?,
        dv: Some(whole(&mut dv, shapes[2])?),
    };
    let lent = lend(&pass.beside);
    let beside = all_beside(&lent)?;
    let sinks = pass.sinks();
    let mut dsinks = sinks.map(Numbers::<Vec<f32>>::zeros);
    let mut call =
        backward_with(pass.plan.backward(saved, view(&numbers[4], dout.1)?, gradients), &views(&beside, &lent)?);
    if let (Some(dsinks), Some(shape)) = (&mut dsinks, sinks) {
        call = call.dsink_logits(whole(dsinks, shape)?);
    }
    call.run().map_err(wrap)?;
    let dsinks = dsinks.zip(sinks).map(|(dsinks, shape)| dsinks.tensor(shape)).transpose()?;
    Ok(([dq.tensor(shapes[0])?, dk.tensor(shapes[1])?, dv.tensor(shapes[2])?], dsinks))
}

pub(crate) fn append<T: Number>(
    call: &Appending,
    (cache, layout): (&mut CpuStorage, &Layout),
    [new, starts]: [Operand; 2],
) -> Result<()> {
    let dtype = cache.dtype();
    let all = T::all_mut(cache).ok_or_else(|| another_dtype(dtype))?;
    let mut cache = Numbers(all.get_mut(layout.start_offset()..).unwrap_or_default());
    let (rows, start_numbers) = (Numbers::<&[T]>::of(new)?, beside(Role::Starts, starts)?);
    let lent = lend(&call.beside);
    let others = all_beside(&lent)?;
    let (rows, starts) = (view(&rows, new.1)?, view(&*start_numbers, starts.1)?);
    let append = call.context.append(&call.problem, (rows, None), (view_mut(&mut cache, layout)?, None), starts);
    append_with(append, &views(&others, &lent)?).run().map_err(wrap)
}
