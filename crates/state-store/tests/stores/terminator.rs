//! TLS in front of a store that has none, with certificates that are made for the test.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, thread};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use rustix::event::{PollFd, PollFlags, poll};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use tempfile::TempDir;

/// Signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate and its private key, in PEM format.
pub struct Identity {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let (key, mut params) = (KeyPair::generate().unwrap(), CertificateParams::default());
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// What a server on this machine needs.
    pub fn server(&self) -> Identity {
        self.sign("localhost", 2099)
    }

    /// An identity with this name, which expires in this year.
    pub fn sign(&self, name: &str, year: i32) -> Identity {
        let (key, mut params) = (KeyPair::generate().unwrap(), CertificateParams::new([name.to_owned()]).unwrap());
        params.not_after = date_time_ymd(year, 1, 1);
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Identity { certificate, key: key.serialize_pem() }
    }
}

/// Passes what comes with TLS to a store, and also what comes without. Its threads end with the test.
pub struct Terminator {
    folder: TempDir,
    pub authority: Authority,
    port: u16,
}

/// Where a store listens.
pub enum Behind {
    Socket(PathBuf),
    Port(u16),
}

impl Terminator {
    /// In front of the store at `socket`, with an identity that an authority of its own signs.
    pub fn start(socket: PathBuf, identity: impl FnOnce(&Authority) -> Identity) -> Self {
        Self::before(Behind::Socket(socket), 0, identity, false)
    }

    /// Listens on `port` (0: any). With `asks`, clients need certificates of the same authority.
    pub fn before(behind: Behind, port: u16, identity: impl FnOnce(&Authority) -> Identity, asks: bool) -> Self {
        let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new("test"));
        fs::write(folder.path().join("ca.pem"), authority.pem()).unwrap();
        let identity = identity(&authority);
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let config = Arc::new(config(&identity, asks.then_some(&authority)));
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let connection = ServerConnection::new(config.clone()).unwrap();
                match &behind {
                    Behind::Socket(path) => {
                        let Ok(store) = UnixStream::connect(path) else { continue };
                        thread::spawn(move || pass(client, store, connection));
                    }
                    Behind::Port(port) => {
                        let Ok(store) = TcpStream::connect(("127.0.0.1", *port)) else { continue };
                        thread::spawn(move || pass(client, store, connection));
                    }
                }
            }
        });
        Self { folder, authority, port }
    }

    pub fn ca(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    pub const fn port(&self) -> u16 {
        self.port
    }

    /// A file that goes with the test.
    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    pub fn location(&self, scheme: &str, path: &str) -> String {
        self.with_ca(scheme, path, &self.ca())
    }

    pub fn with_ca(&self, scheme: &str, path: &str, ca: &Path) -> String {
        format!("{scheme}://localhost:{}{path}?ca={}", self.port, ca.display())
    }
}

fn config(identity: &Identity, of_clients: Option<&Authority>) -> ServerConfig {
    let provider = Arc::new(default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions().unwrap();
    let builder = match of_clients {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
            builder.with_client_cert_verifier(verifier)
        }
    };
    let certificate = CertificateDer::from_pem_slice(identity.certificate.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap();
    builder.with_single_cert(vec![certificate], key).unwrap()
}

/// Passes bytes in both directions until one end closes.
fn pass<S: Read + Write + AsFd>(mut client: TcpStream, mut store: S, tls: ServerConnection) {
    let mut first = [0];
    // A handshake begins with this byte, and a command with another one.
    let has_tls = client.peek(&mut first).is_ok_and(|read| read == 1) && first == [22];
    let mut tls = has_tls.then_some(tls);
    let mut bytes = vec![0; 1 << 16];
    loop {
        let (of_client, of_store) = (PollFd::new(&client, PollFlags::IN), PollFd::new(&store, PollFlags::IN));
        let mut polled = [of_client, of_store];
        if poll(&mut polled, None).is_err() {
            return;
        }
        let [from_client, from_store] = polled.map(|of| !of.revents().is_empty());
        if from_client && !pass_request(&mut client, &mut store, tls.as_mut(), &mut bytes) {
            return;
        }
        if from_store {
            let Ok(read @ 1..) = store.read(&mut bytes) else { return };
            let written = match &mut tls {
                Some(tls) => tls.writer().write_all(&bytes[..read]),
                None => client.write_all(&bytes[..read]),
            };
            if written.is_err() {
                return;
            }
        }
        while let Some(tls) = tls.as_mut().filter(|tls| tls.wants_write()) {
            if tls.write_tls(&mut client).is_err() {
                return;
            }
        }
    }
}

/// False if the connection ends.
fn pass_request(
    client: &mut TcpStream,
    store: &mut impl Write,
    tls: Option<&mut ServerConnection>,
    bytes: &mut [u8],
) -> bool {
    let Some(tls) = tls else {
        return matches!(client.read(bytes), Ok(read @ 1..) if store.write_all(&bytes[..read]).is_ok());
    };
    if !matches!(tls.read_tls(client), Ok(1..)) {
        return false;
    }
    if tls.process_new_packets().is_err() {
        // Lets the client read why.
        _ = tls.write_tls(client);
        _ = client.shutdown(Shutdown::Write);
        _ = client.read_to_end(&mut Vec::new());
        return false;
    }
    loop {
        match tls.reader().read(bytes) {
            Ok(0) => return false,
            Ok(read) if store.write_all(&bytes[..read]).is_ok() => {}
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
            Ok(_) => return false,
        }
    }
}
