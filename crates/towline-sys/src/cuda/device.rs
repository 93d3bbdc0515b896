//! Devices, and the context that everything happens in.
#![allow(unsafe_code, reason = "foreign calls")]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use super::Cuda;
use super::api::{Api, RawContext, RawDevice, RawUuid, code};
use crate::{Error, Result};

/// What a device can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Attribute {
    /// How many multiprocessors it has.
    Multiprocessors = 16,
    /// Whether it is part of the CPU's package and shares its memory.
    Integrated = 18,
    /// How many copy engines it has.
    CopyEngines = 40,
    /// Whether host and devices share one address space.
    UnifiedAddressing = 41,
    /// The compute capability, before the point.
    ComputeMajor = 75,
    /// The compute capability, after the point.
    ComputeMinor = 76,
    /// Whether registered host memory has the same address on the device.
    SameHostPointer = 91,
    /// Whether host memory can be registered.
    HostRegister = 99,
    /// Whether physical memory can be allocated and mapped separately.
    VirtualMemory = 102,
    /// Whether such memory can be handed over as a file descriptor.
    PosixDescriptors = 103,
    /// Whether there are memory pools.
    MemoryPools = 115,
    /// Whether events, and with them legacy IPC, can be shared between processes.
    IpcEvents = 125,
}

/// One GPU.
#[derive(Clone)]
pub struct Device {
    cuda: Cuda,
    ordinal: u32,
    pub(crate) raw: RawDevice,
}

impl Cuda {
    /// The device of that ordinal.
    pub fn device(&self, ordinal: u32) -> Result<Device> {
        self.init()?;
        let mut raw = 0;
        let number = c_int::try_from(ordinal)
            .map_err(|_| Error::argument("cuDeviceGet", format!("there is no device {ordinal}")))?;
        // SAFETY: `raw` outlives the call.
        self.api().check("cuDeviceGet", unsafe { (self.api().device)(&mut raw, number) })?;
        Ok(Device { cuda: self.clone(), ordinal, raw })
    }

    /// Whether the calling thread has a current context.
    pub fn has_current(&self) -> Result<bool> {
        let mut current = ptr::null_mut();
        // SAFETY: `current` outlives the call.
        let code = unsafe { (self.api().current_context)(&mut current) };
        self.api().check("cuCtxGetCurrent", code)?;
        Ok(!current.is_null())
    }

    /// A number for the context that is current in the calling thread; 0 where none is.
    pub fn current_id(&self) -> Result<usize> {
        let mut current = ptr::null_mut();
        // SAFETY: `current` outlives the call.
        let code = unsafe { (self.api().current_context)(&mut current) };
        self.api().check("cuCtxGetCurrent", code)?;
        Ok(current.addr())
    }
}

impl Device {
    /// The driver that it belongs to.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// Its position among the devices that this process sees.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn api(&self) -> &Api {
        self.cuda.api()
    }

    /// Its name.
    pub fn name(&self) -> Result<String> {
        self.text("cuDeviceGetName", self.api().device_name)
    }

    /// Where it sits on the bus, as `0000:1b:00.0`.
    pub fn bus(&self) -> Result<String> {
        self.text("cuDeviceGetPCIBusId", self.api().device_bus).map(|text| text.to_ascii_lowercase())
    }

    fn text(
        &self,
        call: &'static str,
        function: unsafe extern "C" fn(*mut c_char, c_int, RawDevice) -> c_int,
    ) -> Result<String> {
        let mut text = [0u8; 256];
        // SAFETY: the array outlives the call and has one byte more than is announced.
        self.api().check(call, unsafe { function(text.as_mut_ptr().cast(), 255, self.raw) })?;
        Ok(CStr::from_bytes_until_nul(&text)
            .map(|text| text.to_string_lossy().into_owned())
            .unwrap_or_default())
    }

    /// The number that names it in every process and container.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        let function = self.cuda.optional(self.api().device_uuid, "cuDeviceGetUuid_v2")?;
        let mut uuid = RawUuid([0; 16]);
        // SAFETY: `uuid` outlives the call.
        self.api().check("cuDeviceGetUuid_v2", unsafe { function(&mut uuid, self.raw) })?;
        Ok(uuid.0)
    }

    /// What it says about itself.
    pub fn attribute(&self, attribute: Attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: `value` outlives the call.
        let code = unsafe { (self.api().device_attribute)(&mut value, attribute as u32, self.raw) };
        self.api().check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// Whether it says yes; what an older driver does not know is a no.
    pub fn can(&self, attribute: Attribute) -> bool {
        self.attribute(attribute).is_ok_and(|value| value != 0)
    }

    /// How many bytes of memory it has.
    pub fn memory(&self) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: `bytes` outlives the call.
        let code = unsafe { (self.api().device_memory)(&mut bytes, self.raw) };
        self.api().check("cuDeviceTotalMem_v2", code)?;
        Ok(bytes as u64)
    }

    /// Whether it can reach the other's memory directly.
    pub fn can_reach(&self, other: &Device) -> Result<bool> {
        let mut possible = 0;
        // SAFETY: `possible` outlives the call.
        let code = unsafe { (self.api().peer_possible)(&mut possible, self.raw, other.raw) };
        self.api().check("cuDeviceCanAccessPeer", code)?;
        Ok(possible != 0)
    }

    /// Retains the primary context, the one that CUDA's runtime library uses too.
    ///
    /// The first time in a process this takes tenths of a second and some hundred MiB of the device.
    pub fn primary_context(&self) -> Result<Context> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` outlives the call.
        let code = unsafe { (self.api().retain_primary)(&mut raw, self.raw) };
        self.api().check("cuDevicePrimaryCtxRetain", code)?;
        let current = self.api().current_directly();
        let alone = self.cuda.device_count().is_ok_and(|count| count == 1);
        Ok(Context(Arc::new(Retained { device: self.clone(), raw, current, alone })))
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({})", self.ordinal)
    }
}

impl Api {
    /// `cuCtxGetCurrent` where the driver says that it is: the function that the loader finds by that name only leads there.
    fn current_directly(&self) -> unsafe extern "C" fn(*mut RawContext) -> c_int {
        /// The version since which it is the same.
        const SINCE: c_int = 4000;
        let (mut found, mut outcome) = (ptr::null_mut(), 0);
        let Some(ask) = self.function else { return self.current_context };
        // SAFETY: the name ends in a zero, and both places outlive the call.
        let code = unsafe { ask(c"cuCtxGetCurrent".as_ptr(), &mut found, SINCE, 0, &mut outcome) };
        if code != 0 || outcome != 0 || found.is_null() {
            return self.current_context;
        }
        // SAFETY: the driver's function of that name, which has had this signature since that version.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut RawContext) -> c_int>(found) }
    }
}

/// A device's primary context, retained until the last clone is gone.
#[derive(Clone, Debug)]
pub struct Context(Arc<Retained>);

#[derive(Debug)]
struct Retained {
    device: Device,
    raw: RawContext,
    /// `cuCtxGetCurrent`, which is asked for at every call.
    current: unsafe extern "C" fn(*mut RawContext) -> c_int,
    /// Whether this process sees no other device.
    alone: bool,
}

thread_local! {
    /// The context that was current when this thread was last asked for, 0 where it was another one or we have taken it off since.
    static SEEN: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the driver's contexts may be used by any thread; the pointer is only a name.
unsafe impl Send for Retained {}
// SAFETY: as above.
unsafe impl Sync for Retained {}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: it was retained once by the code that made this value. A refusal leaves it to the end of the process.
        unsafe { (self.device.api().release_primary)(self.device.raw) };
    }
}

impl Context {
    /// The device that it is on.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Makes it current in the calling thread until the result is dropped; then the one before is current again. Nothing is
    /// done where it is current already, which is cheaper to ask than to switch.
    #[inline]
    pub fn enter(&self) -> Result<Entered<'_>> {
        let pushed = !self.is_current();
        if pushed {
            self.push()?;
        }
        Ok(Entered { context: self, pushed, _one_thread: PhantomData })
    }

    /// Whether it is current in the calling thread.
    #[inline]
    pub fn is_current(&self) -> bool {
        let retained = &*self.0;
        let mut current = ptr::null_mut();
        // SAFETY: `current` outlives the call.
        let code = unsafe { (retained.current)(&mut current) };
        let is = code == 0 && current == retained.raw;
        SEEN.set(if is { current.addr() } else { 0 });
        is
    }

    /// Whether it is current in the calling thread, or was when that was last asked for and the only device is this one: for a call
    /// that leaves this device's primary context current, whatever was before.
    #[inline]
    pub fn was_current(&self) -> bool {
        self.name().was_current() || self.is_current()
    }

    /// Its name, for callers that ask often; the name of no device where there are other devices.
    pub fn name(&self) -> ContextName {
        if self.0.alone { ContextName(self.0.raw.addr()) } else { ContextName::NONE }
    }

    #[cold]
    fn push(&self) -> Result<()> {
        let api = self.0.device.api();
        // SAFETY: the context is alive, since this value retains it.
        api.check("cuCtxPushCurrent_v2", unsafe { (api.push_context)(self.0.raw) })
    }

    pub(crate) fn raw(&self) -> RawContext {
        self.0.raw
    }
}

/// Which context, where it is the only one of the process's.
#[derive(Clone, Copy, Debug)]
pub struct ContextName(usize);

impl ContextName {
    /// Of no context: none is ever current by that name.
    pub const NONE: ContextName = ContextName(usize::MAX);

    /// Whether it was current in the calling thread when that was last asked for, and was not taken off by us since.
    #[inline]
    pub fn was_current(self) -> bool {
        SEEN.get() == self.0
    }
}

/// A context while it is current in this thread.
#[derive(Debug)]
pub struct Entered<'a> {
    context: &'a Context,
    pushed: bool,
    _one_thread: PhantomData<*const ()>,
}

impl<'a> Entered<'a> {
    /// The context.
    pub fn context(&self) -> &'a Context {
        self.context
    }

    /// The driver.
    pub fn cuda(&self) -> &'a Cuda {
        self.context.0.device.cuda()
    }

    pub(crate) fn api(&self) -> &'a Api {
        self.cuda().api()
    }

    /// Lets kernels and copies of this context reach the other's memory; that it was on already is fine.
    pub fn enable_peer(&self, other: &Context) -> Result<()> {
        // SAFETY: the other context is alive, since `other` retains it.
        let answer = unsafe { (self.api().enable_peer)(other.raw(), 0) };
        if answer == code::PEER_ACCESS_ALREADY_ENABLED {
            return Ok(());
        }
        self.api().check("cuCtxEnablePeerAccess", answer)
    }
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.pushed {
            return;
        }
        let mut popped = ptr::null_mut();
        // SAFETY: this value pushed one context in this thread (it is not `Send`), and nested ones were taken off before.
        unsafe { (self.api().pop_context)(&mut popped) };
        SEEN.set(0);
    }
}
