//! Any message: for what handles frames without caring which they are.

use super::*;

macro_rules! messages {
    ($($name:ident),* $(,)?) => {
        /// The body of a frame, with the frame's kind.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub enum Message {
            $(
                #[doc = concat!("A [`", stringify!($name), "`].")]
                $name($name),
            )*
        }

        impl Message {
            /// Returns the kind of frame that carries it.
            pub fn kind(&self) -> FrameKind {
                match self { $(Message::$name(_) => FrameKind::$name,)* }
            }

            /// Appends the body.
            pub fn encode(&self, out: &mut Vec<u8>) {
                match self { $(Message::$name(body) => body.encode(out),)* }
            }

            /// Reads the body of a frame of that kind.
            pub fn decode(kind: FrameKind, body: &[u8]) -> Result<Message> {
                match kind { $(FrameKind::$name => $name::decode(body).map(Message::$name),)* }
            }
        }

        $(
            impl From<$name> for Message {
                fn from(body: $name) -> Message {
                    Message::$name(body)
                }
            }
        )*
    };
}

messages!(
    Hello, Welcome, Refuse, Prove, Ready, Held, Import, Granted, Release, Unmap, Query, QueryReply, Recall,
    Read, Data, Write, Reduce, Done, Atomic, Signal, Notify, Cancel, Finish, Check, Withdraw, EndLane, Ping,
    Pong, Bye,
);

impl Message {
    /// Writes header and body into one buffer.
    pub fn frame(&self, id: u64, payload_len: u64, files: u8) -> Vec<u8> {
        let mut body = Vec::new();
        self.encode(&mut body);
        frame(self.kind(), id, &body, payload_len, files)
    }
}
