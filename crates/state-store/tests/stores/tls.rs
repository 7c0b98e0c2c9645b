//! `rediss://`: certificates are checked, and errors name the file. `main` and `asking` run their tests with TLS as
//! well.

use std::net::TcpListener;

use super::terminator::{Authority, Behind, Identity};
use super::valkey::wait_until;
use super::*;

fn denied(location: &str, words: &[&str]) {
    let error = keeper(location).claim(&[(b"n7", true)]).unwrap_err();
    assert!(matches!(error, StoreError::Denied(_)), "{location}: {error}");
    for word in words {
        assert!(error.to_string().contains(word), "{location}: {error}");
    }
}

#[test]
fn a_store_without_a_valid_certificate_is_refused() {
    let valkey = Valkey::start(&[]);
    let start = |identity: fn(&Authority) -> Identity| Terminator::start(valkey.socket(), identity);
    let good = start(Authority::server);
    assert!(matches!(claim(&keeper(&good.location("rediss", "")), b"n7"), Claimed::Absent));
    let foreign = good.file("foreign.pem", Authority::new("foreign").pem());
    denied(&good.with_ca("rediss", "", &foreign), &["UnknownIssuer", "foreign.pem"]);
    // No authority of the system has signed it.
    denied(&format!("rediss://localhost:{}", good.port()), &["UnknownIssuer", "certificates of this system"]);
    denied(&start(|authority| authority.sign("localhost", 2001)).location("rediss", ""), &["expired", "ca.pem"]);
    denied(&start(|authority| authority.sign("other.test", 2099)).location("rediss", ""), &["other.test"]);
}

#[test]
fn files_that_are_missing_or_no_certificates_are_named() {
    let valkey = Valkey::start(&[]);
    let good = Terminator::start(valkey.socket(), Authority::server);
    denied(&good.with_ca("rediss", "", "/no/such.pem".as_ref()), &["/no/such.pem", "No such file"]);
    denied(&good.with_ca("rediss", "", &good.file("empty.pem", "hush")), &["empty.pem", "no certificate"]);
    let identity = good.authority.server();
    let (certificate, key) = (good.file("cert.pem", &identity.certificate), good.file("key.pem", &identity.key));
    let with = |certificate: &std::path::Path, key: &std::path::Path| {
        format!("{}&cert={}&key={}", good.location("rediss", ""), certificate.display(), key.display())
    };
    denied(&with(&certificate, &certificate), &["cert.pem", "no private key"]);
    denied(&with(&key, &key), &["key.pem", "no certificate"]);
    let other = good.file("other.pem", &good.authority.server().key);
    denied(&with(&certificate, &other), &["TLS", "cert.pem"]);
}

#[test]
fn a_store_that_wants_a_certificate_gets_it_and_files_can_change() {
    let valkey = Valkey::start(&[]);
    let strict = Terminator::before(Behind::Socket(valkey.socket()), 0, Authority::server, true);
    denied(&strict.location("rediss", ""), &["CertificateRequired", "this server: none"]);
    let write = |of: &Identity| {
        strict.file("cert.pem", &of.certificate);
        strict.file("key.pem", &of.key);
    };
    write(&Authority::new("foreign").sign("triton", 2099));
    let folder = strict.ca();
    let folder = folder.parent().unwrap().display();
    let location = format!("{}&cert={folder}/cert.pem&key={folder}/key.pem", strict.location("rediss", ""));
    let keeper = keeper(&location);
    let error = keeper.claim(&[(b"n7", true)]).unwrap_err();
    assert!(matches!(&error, StoreError::Denied(why) if why.contains("cert.pem")), "{error}");
    write(&strict.authority.sign("triton", 2099));
    wait_until(|| keeper.claim(&[(b"n7", true)]).is_ok());
    assert_eq!(
        taken(&keeper, {
            start(&keeper, b"n8", b"one");
            b"n8"
        })
        .1,
        b"one"
    );
}

#[test]
fn a_store_that_does_not_speak_tls_or_does_not_answer_is_an_error_within_its_time() {
    let mut valkey = Valkey::on_network(&[]);
    let good = Terminator::start(valkey.socket(), Authority::server);
    let fails = |keeper: &Keeper| {
        let began = Instant::now();
        let error = keeper.claim(&[(b"n9", true)]).unwrap_err();
        assert!(matches!(&error, StoreError::Unreachable(why) if why.contains("in time")), "{error}");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    };
    // It waits for the end of a command.
    fails(&keeper(&format!("rediss://localhost:{}?ca={}", valkey.port(), good.ca().display())));
    // Nothing accepts its connections, so no handshake begins.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    fails(&keeper(&format!("rediss://localhost:{port}?ca={}", good.ca().display())));
    let open = keeper(&good.location("rediss", ""));
    let hold = start(&open, b"n7", &[7; 3 << 20]);
    valkey.signal(Signal::STOP);
    fails(&open);
    valkey.signal(Signal::CONT);
    wait_until(|| open.claim(&[(b"n8", true)]).is_ok());
    assert!(matches!(save(&open, &hold, b"two"), Saved::Done(_)));
}
