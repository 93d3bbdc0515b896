//! TLS 1.3 for what goes over TCP: whose keys, and whom they are believed to belong to.
//!
//! Why it is done this way stands in `docs/decisions/0012-tls.md`.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, ServerConfig, ServerConnection,
    SignatureScheme,
};

use crate::{Error, Kind, Result};

const OP: &str = "tls";

/// What both sides say they speak inside.
const PROTOCOL: &[u8] = b"towline/1";

/// The label under which both sides derive what their proofs are bound to.
pub(crate) const BINDING: &[u8] = b"EXPORTER-towline-binding";

/// How an endpoint encrypts what goes over TCP, and by what it knows its peers. TLS 1.3, and nothing older.
///
/// An endpoint that has one uses it for every TCP connection, in and out: peers without TLS are refused, and owners
/// without it are not used. Unix sockets stay as they are: nothing of theirs leaves the host.
///
/// In both forms Towline's own handshake is bound to the TLS connection, so that the proof of a ticket (and of the
/// endpoint's secret) is worth nothing on any other connection: nobody in the middle can pass it on.
///
/// ```
/// use towline::{Endpoint, Tls};
/// let endpoint = Endpoint::options("decode-0").tls(Tls::by_ticket()?).open()?;
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone)]
pub struct Tls {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    certificates: bool,
}

impl Tls {
    /// Makes a key for this process's life. Peers know each other by the tickets that they hold, and by the endpoint's
    /// secret where one is required: nothing has to be set up.
    pub fn by_ticket() -> Result<Tls> {
        let provider = provider();
        let pkcs8 = ring::signature::Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new())
            .map_err(|_| Error::new(Kind::Native, OP, "no key could be made"))?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pkcs8.as_ref().to_vec()));
        let key = provider.key_provider.load_private_key(key).map_err(|error| internal(&error))?;
        let public =
            key.public_key().ok_or_else(|| Error::new(Kind::Internal, OP, "a key without a public half"))?;
        let raw = CertificateDer::from(public.as_ref().to_vec());
        let certified = Arc::new(CertifiedKey::new(vec![raw], key));
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| internal(&error))?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified)));
        let any = AnyKey { algorithms: provider.signature_verification_algorithms };
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| internal(&error))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(any))
            .with_no_client_auth();
        Ok(Tls::new(server, client, false))
    }

    /// Uses a certificate on both sides, beside tickets and secret. All three are PEM: the chain of this endpoint's
    /// certificate, its private key, and the authorities whose certificates are believed.
    ///
    /// A certificate must be valid for the name of its endpoint, up to the first `:` or `/` of that name (`decode:7` needs
    /// one for `decode`), and it must be allowed to serve both as a client's and as a server's.
    pub fn by_certificate(chain: &[u8], key: &[u8], authorities: &[u8]) -> Result<Tls> {
        let certificates = |what: &str, pem: &[u8]| -> Result<Vec<CertificateDer<'static>>> {
            let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
            match found {
                Ok(found) if !found.is_empty() => Ok(found),
                Ok(_) => Err(Error::invalid(OP, format!("{what} holds no certificate in PEM form"))),
                Err(error) => Err(Error::invalid(OP, format!("{what} cannot be read: {error}"))),
            }
        };
        let chain = certificates("the chain", chain)?;
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|error| Error::invalid(OP, format!("the private key cannot be read: {error}")))?;
        let mut roots = RootCertStore::empty();
        for authority in certificates("the list of authorities", authorities)? {
            roots
                .add(authority)
                .map_err(|error| Error::invalid(OP, format!("an authority is not usable: {error}")))?;
        }
        let (provider, roots) = (provider(), Arc::new(roots));
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|error| Error::invalid(OP, format!("the authorities are not usable: {error}")))?;
        let unusable =
            |error: rustls::Error| Error::invalid(OP, format!("the certificate is not usable: {error}"));
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| internal(&error))?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(unusable)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| internal(&error))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(unusable)?;
        Ok(Tls::new(server, client, true))
    }

    fn new(mut server: ServerConfig, mut client: ClientConfig, certificates: bool) -> Tls {
        // Every connection has keys of its own: a resumed one would save little, and its binding would be another.
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        client.resumption = rustls::client::Resumption::disabled();
        client.enable_sni = false;
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        Tls { server: Arc::new(server), client: Arc::new(client), certificates }
    }

    /// The owner's side of a connection.
    pub(crate) fn accept(&self) -> Result<rustls::Connection> {
        let server = ServerConnection::new(Arc::clone(&self.server)).map_err(|error| internal(&error))?;
        Ok(rustls::Connection::Server(server))
    }

    /// The side of a connection that comes to the owner of that name.
    pub(crate) fn connect(&self, owner: &str) -> Result<rustls::Connection> {
        // Without certificates there is nothing to compare a name with.
        let name = if self.certificates { server_name(owner)? } else { server_name("towline")? };
        let client =
            ClientConnection::new(Arc::clone(&self.client), name).map_err(|error| internal(&error))?;
        Ok(rustls::Connection::Client(client))
    }

    /// Refuses a peer whose certificate is not for the name that it gives.
    pub(crate) fn check_peer(&self, connection: &rustls::Connection, name: &str) -> Result<()> {
        if !self.certificates {
            return Ok(());
        }
        let denied = |why: String| {
            let message =
                format!("the certificate of the peer that calls itself {name:?} is not accepted: {why}");
            Err(Error::new(Kind::PermissionDenied, OP, message))
        };
        let Some(certificate) = connection.peer_certificates().and_then(<[_]>::first) else {
            return denied("there is none".into());
        };
        let parsed = match ParsedCertificate::try_from(certificate) {
            Ok(parsed) => parsed,
            Err(error) => return denied(error.to_string()),
        };
        match rustls::client::verify_server_name(&parsed, &server_name(name)?) {
            Ok(()) => Ok(()),
            Err(error) => denied(error.to_string()),
        }
    }
}

/// A stream inside TLS, for the crates on top of this one that have connections of their own. It blocks where the stream
/// below it does.
#[doc(hidden)]
pub struct TlsStream<S> {
    tls: rustls::Connection,
    stream: S,
}

impl Tls {
    /// The side that was connected to.
    #[doc(hidden)]
    pub fn incoming<S: Read + Write>(&self, stream: S) -> Result<TlsStream<S>> {
        Ok(TlsStream { tls: self.accept()?, stream })
    }

    /// The side that connects.
    #[doc(hidden)]
    pub fn outgoing<S: Read + Write>(&self, stream: S) -> Result<TlsStream<S>> {
        Ok(TlsStream { tls: self.connect("towline")?, stream })
    }
}

impl<S: Read + Write> TlsStream<S> {
    /// Greets the other side.
    pub fn greet(&mut self) -> io::Result<()> {
        while self.tls.is_handshaking() {
            self.push_out()?;
            if self.tls.is_handshaking() {
                self.pull_in()?;
            }
        }
        self.push_out()
    }

    /// What both ends of this connection, and nobody else, can derive; an error before they have greeted each other.
    pub fn binding(&self) -> io::Result<[u8; 32]> {
        self.tls.export_keying_material([0; 32], BINDING, None).map_err(io::Error::other)
    }

    /// Whether something is left that the stream has not taken yet.
    pub fn is_pending(&self) -> bool {
        self.tls.wants_write()
    }

    /// The stream below.
    pub fn stream(&self) -> &S {
        &self.stream
    }

    fn push_out(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            if self.tls.write_tls(&mut self.stream)? == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }

    fn pull_in(&mut self) -> io::Result<()> {
        if self.tls.read_tls(&mut self.stream)? == 0 && self.tls.is_handshaking() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let processed =
            self.tls.process_new_packets().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
        // An alert says to the other side what is wrong; that it cannot be sent now is not an error of the reading.
        match self.push_out() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => processed.and(Err(error)),
            _ => processed.map(drop),
        }
    }
}

impl<S: Read + Write> Read for TlsStream<S> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.pull_in()?,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                read => return read,
            }
        }
    }
}

impl<S: Read + Write> Write for TlsStream<S> {
    /// Takes nothing while something is pending.
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.push_out()?;
        let taken = self.tls.writer().write(from)?;
        match self.push_out() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(taken),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.push_out()
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.certificates { "Tls(by certificate)" } else { "Tls(by ticket)" })
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn internal(error: &rustls::Error) -> Error {
    Error::new(Kind::Internal, OP, error.to_string())
}

/// What a certificate must be valid for: an endpoint's name without what tells its instances apart.
fn server_name(name: &str) -> Result<ServerName<'static>> {
    let name = name.split([':', '/']).next().unwrap_or(name);
    ServerName::try_from(name.to_owned()).map_err(|_| {
        let message =
            format!("with certificates an endpoint is named like a host, and {name:?} is not such a name");
        Error::invalid(OP, message)
    })
}

/// Believes any key: who has it is proven inside, by the ticket, over this very connection.
#[derive(Debug)]
struct AnyKey {
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("only TLS 1.3 is used".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(cert.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
