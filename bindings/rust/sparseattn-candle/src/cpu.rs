// SPDX-License-Identifier: MIT
//! Passes on the CPU, in candle's vectors.
use crate::{all_on, view, view_mut, wrap, Lent, Pass};
use candle_core::{CpuStorage, Device, Layout, Result, Shape, Storage, Tensor, WithDType};
use sparseattn::{Dtype, Gradients, Memory, MemoryMut, Saved};
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};

type Operand<'a> = (&'a CpuStorage, &'a Layout);

/// A number that tensors of operands may have.
pub(crate) trait Number: WithDType {
    const CALLED: Dtype;
}
impl Number for f32 {
    const CALLED: Dtype = Dtype::F32;
}
impl Number for f64 {
    const CALLED: Dtype = Dtype::F64;
}
impl Number for half::f16 {
    const CALLED: Dtype = Dtype::F16;
}
impl Number for half::bf16 {
    const CALLED: Dtype = Dtype::BF16;
}

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
    let (q, k, v) = (view(&numbers[0], q.1)?, view(&numbers[1], k.1)?, view(&numbers[2], v.1)?);
    let lse_view = view_mut(&mut lse, &pass.lse_shape)?;
    pass.plan.forward(q, k, v, view_mut(&mut out, &shape)?).lse(lse_view).run().map_err(wrap)?;
    pass.keep(lse.tensor(&pass.lse_shape)?);
    Ok((T::to_cpu_storage_owned(out.0), shape))
}

/// dq, dk and dv of q, k, v, out, dout and lse.
pub(crate) fn backward<T: Number>(pass: &Pass, lent: &[Lent; 6]) -> Result<[Tensor; 3]> {
    let operands = all_on(lent, |storage| match storage {
        Storage::Cpu(storage) => Some(storage),
        _ => None,
    })?;
    let [q, k, v, out, dout, lse] = operands;
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
        dq: view_mut(&mut dq, shapes[0])?,
        dk: view_mut(&mut dk, shapes[1])?,
        dv: Some(view_mut(&mut dv, shapes[2])?),
    };
    pass.plan.backward(saved, view(&numbers[4], dout.1)?, gradients).run().map_err(wrap)?;
    Ok([dq.tensor(shapes[0])?, dk.tensor(shapes[1])?, dv.tensor(shapes[2])?])
}
