//! NCCL without a GPU, for tests: `libtowline_fake_nccl.so` has the functions of `libnccl.so.2` that Towline calls.
//!
//! It is loaded where `TOWLINE_NCCL` (or `Nccl::load_from`) names it and never otherwise. Memory is that of the fake CUDA
//! driver, or of a real one: whichever this process has loaded, or `TOWLINE_CUDA` names.
//!
//! What it does is what NCCL does, as far as a caller can tell:
//! * Ranks are threads of one process, which meet by their id. Calls go into streams and copy and combine for real; ranks
//!   that do not come leave the others' streams waiting, until the communicator is aborted or revoked.
//! * A window needs memory of `ncclMemAlloc` or of `cuMemCreate`, at a multiple of 4096. Its handle is written at the end of the
//!   group, or when a non-blocking communicator has nothing in progress, into the place that was given.
//! * A handle or communicator that is not there any more is refused.
//!
//! Settings, all read at the first call:
//!
//! | variable | meaning |
//! | --- | --- |
//! | `FAKE_NCCL_FAIL` | `ncclCommRegister:3,ncclAllReduce:1@3`: these calls give these codes, always or the third time only |
//! | `FAKE_NCCL_VERSION` | the version (22907) |
//! | `FAKE_NCCL_NO` | `windows`: registering one gives no handle; `mapping`: other ranks' windows are not mapped |
//! | `FAKE_NCCL_DELAY_MS` | how long what a non-blocking communicator does is in progress (5) |
//! | `FAKE_NCCL_STUCK` | these calls never end by themselves: a blocking communicator waits in them, another stays in progress |
//! | `FAKE_NCCL_LOG` | a file to which the name of every call is added |
#![allow(unsafe_code, reason = "it is a library of foreign functions, called by pointer")]
#![allow(non_snake_case, reason = "NCCL's names")]

mod comm;
mod driver;
mod element;
mod settings;
mod team;
mod work;

use std::path::PathBuf;

/// The file of the library that Cargo built together with the running test or program.
///
/// `None` where there is none beside it: the program was installed or copied elsewhere.
pub fn library() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    [folder.to_owned(), folder.join("deps")]
        .map(|folder| folder.join("libtowline_fake_nccl.so"))
        .into_iter()
        .find(|file| file.exists())
}
