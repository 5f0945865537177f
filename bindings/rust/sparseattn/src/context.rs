// SPDX-License-Identifier: MIT
//! The device that plans are made for.
use crate::error::{check, sized, Result};
use crate::plan::{Plan, Problem};
use crate::run::Stream;
use crate::{sys, Device, Pattern};
use std::ffi::{c_char, c_void, CStr};
use std::fmt;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicI64, Ordering};

/// How much a context says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum LogLevel {
    Error = sys::SPATTN_LOG_ERROR as isize,
    Info = sys::SPATTN_LOG_INFO as isize,
    Debug = sys::SPATTN_LOG_DEBUG as isize,
}

/// What a log gets: called from any thread.
type Log = dyn Fn(LogLevel, &str) + Send + Sync;

/// Whether a call shall end early: asked on the thread that made it.
type Cancel = dyn Fn() -> bool + Send + Sync;

/// What runs tasks: told how many, and what each of so many calls does.
type Parallel = dyn Fn(usize, &(dyn Fn() + Sync)) + Send + Sync;

/// How a context shall be.
#[derive(Clone, Copy, Default)]
pub struct ContextOptions {
    device: Option<Device>,
    cpu_threads: i32,
    plan_cache: i64,
    log: Option<(LogLevel, &'static Log)>,
    cancel: Option<&'static Cancel>,
    parallel: Option<&'static Parallel>,
}

impl ContextOptions {
    /// The first GPU that has kernels in this build, else the CPU, and its defaults.
    pub fn new() -> Self {
        Self::default()
    }
    /// This device.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }
    /// Threads on the CPU; 0 is all that this process may use. Results never depend on it.
    pub fn cpu_threads(mut self, threads: i32) -> Self {
        self.cpu_threads = threads;
        self
    }
    /// Plans kept for equal patterns and problems: 0 is 64, -1 none. Together they hold 256 MiB at most, or 4 MiB for
    /// each of more than 64; where large ones are more, those that were used last are kept.
    pub fn plan_cache(mut self, plans: i64) -> Self {
        self.plan_cache = plans;
        self
    }
    /// Where lines up to a level go. It is kept for ever: plans may speak after their context is gone. It must not
    /// panic (which ends the process) nor use the context that speaks.
    pub fn log(mut self, level: LogLevel, log: &'static Log) -> Self {
        self.log = Some((level, log));
        self
    }
    /// What is asked some 20 ms apart while plans are made and passes run on the CPU: `true` ends the call with
    /// [`ErrorKind::Cancelled`](crate::ErrorKind::Cancelled), and what it has written means nothing. It is kept for ever,
    /// as a log is. It must not panic (which ends the process) nor use the context that asks.
    ///
    /// ```
    /// use sparseattn::{causal, logsparse, Context, ContextOptions, Device, ErrorKind, Problem};
    /// use std::sync::atomic::{AtomicBool, Ordering};
    /// static STOP: AtomicBool = AtomicBool::new(false);
    /// let options = ContextOptions::new().device(Device::Cpu).cancel(&|| STOP.load(Ordering::Relaxed));
    /// let context = Context::with(options)?;
    /// STOP.store(true, Ordering::Relaxed); // by whoever waits no longer
    /// let slow = context.plan(&(causal() & logsparse()), &Problem::new(1, 8, 1 << 20, 64));
    /// assert_eq!(slow.err().unwrap().kind(), ErrorKind::Cancelled);
    /// # Ok::<(), sparseattn::Error>(())
    /// ```
    pub fn cancel(mut self, cancel: &'static Cancel) -> Self {
        self.cancel = Some(cancel);
        self
    }
    /// Who runs the tasks of passes on the CPU, in place of threads of the context's own: it is told how many there are,
    /// up to [`cpu_threads`](Self::cpu_threads), and calls `task` so often, each time for another one, on any of its
    /// threads. Tasks that it leaves when it returns are run by the thread that made the call, and further calls do
    /// nothing. It is kept for ever, as a log is. It must not panic (which ends the process) nor use the context that
    /// asks. With rayon:
    ///
    /// ```text
    /// options.parallel(&|tasks, task| (0..tasks).into_par_iter().for_each(|_| task()))
    /// ```
    pub fn parallel(mut self, run: &'static Parallel) -> Self {
        self.parallel = Some(run);
        self
    }
}

impl fmt::Debug for ContextOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextOptions")
            .field("device", &self.device)
            .field("cpu_threads", &self.cpu_threads)
            .field("plan_cache", &self.plan_cache)
            .field("log", &self.log.map(|(level, _)| level))
            .field("cancel", &self.cancel.is_some())
            .field("parallel", &self.parallel.is_some())
            .finish()
    }
}

/// Makes plans for one device. Clones share it, and so may threads.
pub struct Context(*mut sys::spattn_context);

// SAFETY: contexts lock themselves, and their count is atomic: sparseattn.h lets any threads share one.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// For the first GPU that has kernels in this build, else for the CPU.
    pub fn new() -> Result<Self> {
        Self::with(ContextOptions::new())
    }
    /// For the CPU.
    pub fn cpu() -> Result<Self> {
        Self::with(ContextOptions::new().device(Device::Cpu))
    }
    /// As the options say.
    pub fn with(options: ContextOptions) -> Result<Self> {
        let mut c = sized!(sys::spattn_context_options);
        if let Some(device) = options.device {
            c.device = device.c();
        }
        c.cpu_threads = options.cpu_threads;
        c.plan_cache = options.plan_cache;
        if let Some((level, log)) = options.log {
            c.log = Some(write);
            c.log_level = level as i32;
            c.log_user = Box::into_raw(Box::new(log)).cast(); // two words that live as long as the log, for ever
        }
        if let Some(cancel) = options.cancel {
            c.cancel = Some(ask);
            c.cancel_user = Box::into_raw(Box::new(cancel)).cast(); // likewise
        }
        if let Some(run) = options.parallel {
            c.parallel_for = Some(run_all);
            c.parallel_for_user = Box::into_raw(Box::new(run)).cast(); // likewise
        }
        let mut made = std::ptr::null_mut();
        // SAFETY: the struct is as long as it says.
        check(unsafe { sys::spattn_context_create(&c, &mut made) })?;
        Ok(Context(made))
    }

    /// Compiles the pattern for these shapes and chooses kernels. Equal patterns and problems share a plan.
    pub fn plan(&self, pattern: &Pattern, problem: &Problem) -> Result<Plan> {
        // SAFETY: the default stream is legal for setup everywhere.
        unsafe { self.make_plan(pattern, problem, std::ptr::null_mut()) }
    }

    /// The same; device copies of lists are made on this stream.
    pub fn plan_on(&self, pattern: &Pattern, problem: &Problem, stream: &impl Stream) -> Result<Plan> {
        // SAFETY: the trait promises a live stream.
        unsafe { self.make_plan(pattern, problem, stream.raw()) }
    }

    pub(crate) fn handle(&self) -> *const sys::spattn_context {
        self.0
    }

    unsafe fn make_plan(&self, pattern: &Pattern, problem: &Problem, stream: *mut c_void) -> Result<Plan> {
        let (pattern, problem) = (pattern.handle()?, problem.c());
        let mut made = std::ptr::null_mut();
        check(sys::spattn_plan_create(self.0, pattern, &problem, stream, &mut made))?;
        Ok(Plan::own(made))
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

impl Clone for Context {
    fn clone(&self) -> Self {
        // SAFETY: the handle is alive.
        unsafe { sys::spattn_context_retain(self.0) };
        Context(self.0)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: this reference is ours.
        unsafe { sys::spattn_context_release(self.0) };
    }
}

unsafe extern "C" fn write(user: *mut c_void, level: i32, text: *const c_char) {
    let log = *user.cast::<&'static Log>();
    let level = match level as u32 {
        sys::SPATTN_LOG_ERROR => LogLevel::Error,
        sys::SPATTN_LOG_INFO => LogLevel::Info,
        _ => LogLevel::Debug,
    };
    // A panic must not cross C.
    let text = CStr::from_ptr(text).to_string_lossy();
    if catch_unwind(AssertUnwindSafe(|| log(level, &text))).is_err() {
        std::process::abort();
    }
}

unsafe extern "C" fn ask(user: *mut c_void) -> i32 {
    answer(*user.cast::<&'static Cancel>())
}

type Body = unsafe extern "C" fn(argument: *mut c_void, task: i64);

unsafe extern "C" fn run_all(user: *mut c_void, tasks: i64, body: Option<Body>, argument: *mut c_void) -> i32 {
    /// What each thread hands to the body.
    struct Argument(*mut c_void);
    // SAFETY: the library wants its tasks run on any threads.
    unsafe impl Sync for Argument {}
    impl Argument {
        fn get(&self) -> *mut c_void {
            self.0
        }
    }

    let (run, argument) = (*user.cast::<&'static Parallel>(), Argument(argument));
    let Some(body) = body else { return -1 };
    // Numbers are dealt here, so that no task runs twice or is left out, whatever `run` does.
    let next = AtomicI64::new(0);
    let one = || {
        let task = next.fetch_add(1, Ordering::Relaxed);
        if task < tasks {
            // SAFETY: each number below `tasks` comes once, and calls end before this function does: `one` is borrowed.
            unsafe { body(argument.get(), task) };
        }
        task < tasks
    };
    let done = catch_unwind(AssertUnwindSafe(|| run(tasks as usize, &|| _ = one())));
    if done.is_err() {
        std::process::abort(); // a panic must not cross C
    }
    while one() {}
    0
}

/// What C gets from who is asked whether a call shall end. A panic must not cross C.
pub(crate) fn answer(cancel: impl FnOnce() -> bool) -> i32 {
    match catch_unwind(AssertUnwindSafe(cancel)) {
        Ok(stop) => stop.into(),
        Err(_) => std::process::abort(),
    }
}
