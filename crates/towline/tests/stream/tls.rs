//! TLS: whom it lets in, what an attacker in the middle can do, and that everything else works inside it.

use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use towline::{Access, Endpoint, Kind, Limits, SystemStorage, Ticket, Tls};

use crate::middle::Middle;
use crate::{LEN, bytes, open, read, region, tcp};

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    fn certificate(&self, name: &str, last_year: i32) -> (String, String) {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(last_year, 1, 1);
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// What an endpoint of that name uses that believes this authority.
    fn tls(&self, name: &str) -> Tls {
        let (chain, key) = self.certificate(name, 2100);
        Tls::by_certificate(chain.as_bytes(), key.as_bytes(), self.pem.as_bytes()).unwrap()
    }
}

/// Everything that goes over a session goes through TLS too.
fn exercise(owner: &Endpoint, user: &Endpoint) {
    let region = region(owner, 1);
    let remote = user.import(&region.ticket().unwrap()).unwrap();
    let explained = remote.explain().to_string();
    assert!(explained.contains("tcp+tls"), "{explained}");
    assert_eq!(read(user, &remote).unwrap(), bytes(1, LEN));
    let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    local.write_at(0, &bytes(2, LEN)).unwrap();
    user.write(&remote, &local).notify("written").start().unwrap().wait().unwrap();
    assert_eq!(owner.receive(Duration::from_secs(20)).unwrap().message, b"written");
    let mut there = vec![0; LEN];
    region.read_at(0, &mut there).unwrap();
    assert!(there == bytes(2, LEN));
    let added = user.fetch_add(&remote, 0, 1).unwrap();
    added.wait().unwrap();
    assert_eq!(added.value(), Some(u64::from_le_bytes(there[..8].try_into().unwrap())));
    // Small ones, many at once.
    let small: Vec<_> =
        (0..100).map(|at| user.read(&remote, &local).at(at * 64, at * 64, 64).start().unwrap()).collect();
    small.iter().for_each(|one| one.wait().unwrap());
    let audit = region.audit();
    assert!(audit.peers[0].reads.1 >= LEN as u64, "{audit}");
}

#[test]
fn tickets_authenticate_an_encrypted_connection() {
    let (owner, user) =
        (open("owner", Some(Tls::by_ticket().unwrap())), open("user", Some(Tls::by_ticket().unwrap())));
    exercise(&owner, &user);
}

#[test]
fn certificates_authenticate_both_sides_by_their_names() {
    let authority = Authority::new();
    let (owner, user) =
        (open("owner:7", Some(authority.tls("owner"))), open("user", Some(authority.tls("user"))));
    exercise(&owner, &user);
}

fn denied(owner: &Endpoint, user: &Endpoint, says: &str) {
    let region = region(owner, 1);
    let error = user.import(&region.ticket().unwrap()).unwrap_err();
    assert_eq!(error.kind(), Kind::PermissionDenied, "{error}");
    assert!(error.to_string().contains(says), "{says:?} is not in: {error}");
    assert!(owner.audit().peers.iter().all(|peer| peer.reads.0 == 0));
}

#[test]
fn a_certificate_of_another_authority_is_refused_by_either_side() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (owner, user) = (open("owner", Some(ours.tls("owner"))), open("user", Some(theirs.tls("user"))));
    denied(&owner, &user, "certificate is not accepted");
    // A user that believes the owner, and that the owner does not believe.
    let (chain, key) = theirs.certificate("user", 2100);
    let believing = Tls::by_certificate(chain.as_bytes(), key.as_bytes(), ours.pem.as_bytes()).unwrap();
    denied(&owner, &open("user", Some(believing)), "does not accept this endpoint");
}

#[test]
fn an_expired_certificate_is_refused_by_either_side() {
    let authority = Authority::new();
    let expired = |name| {
        let (chain, key) = authority.certificate(name, 2020);
        Tls::by_certificate(chain.as_bytes(), key.as_bytes(), authority.pem.as_bytes()).unwrap()
    };
    denied(&open("owner", Some(expired("owner"))), &open("user", Some(authority.tls("user"))), "xpired");
    denied(&open("owner", Some(authority.tls("owner"))), &open("user", Some(expired("user"))), "xpired");
}

#[test]
fn a_certificate_for_another_name_is_refused_by_either_side() {
    let authority = Authority::new();
    let (good, other) = (authority.tls("user"), authority.tls("other"));
    denied(&open("owner", Some(other.clone())), &open("user", Some(good)), "certificate is not accepted");
    denied(&open("owner", Some(authority.tls("owner"))), &open("user", Some(other)), "calls itself \"user\"");
    let unnamed = open("two words", Some(authority.tls("user")));
    let error =
        open("user", Some(authority.tls("user"))).import(&region(&unnamed, 1).ticket().unwrap()).unwrap_err();
    assert!(error.to_string().contains("is not such a name"), "{error}");
}

#[test]
fn whoever_does_not_use_tls_is_told_so_and_the_error_names_the_right_side() {
    let authority = Authority::new();
    let tls = || Some(Tls::by_ticket().unwrap());
    // The user reads both: "this endpoint" is its own.
    let by_owner = "the owner requires TLS, and this endpoint was opened without it";
    denied(&open("owner", tls()), &open("user", None), by_owner);
    let by_user = "this endpoint requires TLS, and the owner was opened without it";
    denied(&open("owner", None), &open("user", tls()), by_user);
    denied(&open("owner", None), &open("user", Some(authority.tls("user"))), by_user);
    denied(&open("owner", Some(authority.tls("owner"))), &open("user", None), by_owner);
    // One by certificate, one by ticket.
    denied(&open("owner", Some(authority.tls("owner"))), &open("user", tls()), "form of TLS");
    denied(&open("owner", tls()), &open("user", Some(authority.tls("user"))), "form of TLS");
}

#[test]
fn nonsense_in_place_of_certificates_is_named() {
    let authority = Authority::new();
    let (chain, key) = authority.certificate("user", 2100);
    let (_, other_key) = authority.certificate("user", 2100);
    let make = |chain: &str, key: &str, roots: &str| {
        Tls::by_certificate(chain.as_bytes(), key.as_bytes(), roots.as_bytes()).unwrap_err()
    };
    for error in [
        make("", &key, &authority.pem),
        make(&chain, "no key", &authority.pem),
        make(&chain, &key, "no roots"),
        make(&chain, &other_key, &authority.pem),
    ] {
        assert_eq!(error.kind(), Kind::Invalid, "{error}");
    }
    assert_eq!(format!("{:?}", authority.tls("user")), "Tls(by certificate)");
}

#[test]
fn the_wrong_secret_is_refused_inside_tls() {
    let limits = Limits { no_progress: Duration::from_secs(20), ..Limits::default() };
    let open = |name: &str, secret: &[u8]| {
        let options = Endpoint::options(name).routing(tcp()).limits(limits).secret(secret);
        options.tls(Tls::by_ticket().unwrap()).open().unwrap()
    };
    denied(&open("owner", b"one"), &open("user", b"two"), "secret");
    exercise(&open("owner", b"one"), &open("user", b"one"));
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[test]
fn somebody_on_the_path_reads_nothing() {
    for encrypted in [false, true] {
        let tls = || encrypted.then(|| Tls::by_ticket().unwrap());
        let middle = Middle::new();
        let (owner, user) = (middle.owner(tls(), false), open("user", tls()));
        let region = region(&owner, 1);
        region.write_at(0, b"a word that nobody else shall read").unwrap();
        let remote = user.import(&region.ticket().unwrap()).unwrap();
        let local = user.register(SystemStorage::new(4096).unwrap(), Access::NONE).unwrap();
        user.read(&remote, &local).at(0, 0, 4096).start().unwrap().wait().unwrap();
        let seen = middle.seen.lock();
        assert_eq!(contains(&seen, b"a word that nobody else shall read"), !encrypted);
        assert_eq!(contains(&seen, b"user"), !encrypted, "names are hidden too");
    }
}

#[test]
fn a_bit_flipped_on_the_way_is_an_error_and_never_wrong_bytes() {
    let right = bytes(1, LEN);
    // In the greetings, in the handshake, in requests, and in the payload of either direction.
    let places = [0, 3, 40, 150, 400, 700, 1000, 1500, 2500, 5000, 20_000, 100_000, 1_000_000, 7_000_000];
    for place in places {
        let tls = || Some(Tls::by_ticket().unwrap());
        let middle = Middle::new();
        middle.flip_after(place);
        let (owner, user) = (middle.owner(tls(), false), open("user", tls()));
        let region = region(&owner, 1);
        let ticket: Ticket = region.ticket().unwrap();
        let outcome = user.import(&ticket).and_then(|remote| read(&user, &remote));
        assert!(middle.has_flipped(), "nothing was flipped at {place}");
        if let Ok(read) = outcome {
            assert!(read == right, "wrong bytes after a flip at {place}");
            panic!("a bit was flipped at {place}, and nobody noticed");
        }
        // The next try is served.
        let remote = user.import(&ticket).unwrap();
        assert!(read(&user, &remote).unwrap() == right);

        let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
        local.write_at(0, &right).unwrap();
        user.write(&remote, &local).start().unwrap().wait().unwrap();
        let mut there = vec![0; LEN];
        region.read_at(0, &mut there).unwrap();
        assert!(there == right);
    }
}
