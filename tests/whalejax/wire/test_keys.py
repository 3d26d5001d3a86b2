"""Key files: what is refused, in words that name the remedy."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from whalejax.meshes.errors import WhaleError
from whalejax.wire import keys
from whalejax.wire.keys import issue_key, load_key, main, make_key, revoke_key


def test_a_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "key"
    make_key(path)
    first = load_key(path)
    make_key(path)
    assert load_key(path).run == first.run and first.name == "everyone"
    files = sorted(path.parent.iterdir())
    assert [p.name for p in files] == ["key", "key.authority"]
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in files)
    # The authority's private key goes to nobody else.
    assert path.read_text().count("PRIVATE KEY-----\n") == 2
    assert path.read_text().startswith("whalejax key of 'everyone', valid until 20")
    path.chmod(0o640)
    with pytest.raises(WhaleError, match=r"mode 640.*expected 600\. Run chmod 600"):
        load_key(path)


def test_each_run_has_an_authority_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_key(tmp_path / name)
    assert load_key(tmp_path / "a").run != load_key(tmp_path / "b").run


@pytest.mark.parametrize("text", ["0123456789abcdef" * 4, "abc", ""])
def test_a_key_of_before_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(
        WhaleError,
        match=r"holds no certificate.*a whalejax that signed its messages.*Remove it "
        r"and begin the run anew, which makes another, and copy that",
    ):
        load_key(path)


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WhaleError, match="cannot be read.*Name the key file"):
        load_key(tmp_path / "none")
    with pytest.raises(WhaleError, match="cannot be read|no regular file"):
        load_key(tmp_path)
    make_key(tmp_path / "key")
    make_key(tmp_path / "other")
    whole = (tmp_path / "key").read_bytes()
    blocks = whole.split(b"-----BEGIN CERTIFICATE-----")
    foreign = (tmp_path / "other").read_bytes().split(b"-----BEGIN CERTIFICATE-----")
    cut = tmp_path / "cut"
    join = b"-----BEGIN CERTIFICATE-----".join
    for data, said in [
        (blocks[0], "holds no private key with its certificate"),
        (join([b"", *blocks[1:]]), "holds no private key with its certificate"),
        (join([*blocks[:2], foreign[2]]), "is not of the authority in it"),
        (join([foreign[0], *blocks[1:]]), "holds no private key with its certificate"),
        (whole[: len(whole) // 2], "holds no private key with its certificate"),
    ]:
        cut.write_bytes(data)
        cut.chmod(0o600)
        with pytest.raises(WhaleError, match=f"{said}.*Copy the file anew"):
            load_key(cut)


def test_a_key_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(tmp_path / "key")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(WhaleError, match="belongs to user"):
        load_key(tmp_path / "key")


def test_an_expired_key_is_refused(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    issue_key(tmp_path / "key", "late", tmp_path / "late", days=-0.5)
    with pytest.raises(
        WhaleError,
        match=r"its certificate has expired\. Make another where the run was begun: "
        r"python -m whalejax.wire.keys issue; or remove the file.*'late', valid until",
    ):
        load_key(tmp_path / "late")


def test_a_process_has_a_key_of_its_own(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    issue_key(tmp_path / "key", "node-1.x", tmp_path / "own")
    own, first = load_key(tmp_path / "own"), load_key(tmp_path / "key")
    assert (own.name, own.run) == ("node-1.x", first.run)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600
    with pytest.raises(WhaleError, match="exists already. Name another file"):
        issue_key(tmp_path / "key", "b", tmp_path / "own")
    for name in ("", "a b", "a/b", "x" * 61, "a\n"):
        with pytest.raises(WhaleError, match="expected at most 60 letters, digits"):
            issue_key(tmp_path / "key", name, tmp_path / "new")
    with pytest.raises(WhaleError, match="own.authority: the authority of the run can"):
        issue_key(tmp_path / "own", "b", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_revoked_name_is_known_at_once(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    key = load_key(tmp_path / "key")
    assert key.refusal("a") == ""
    main(["revoke", str(tmp_path / "key"), "a"])
    assert "'a' was revoked. Make that process another key" in key.refusal("a")
    revoke_key(tmp_path / "key", "b")
    os.utime(tmp_path / "key.revoked", (1, 1))
    assert key.revoked() == {"a", "b"} and key.refusal("c") == ""


def test_a_certificate_of_a_process_makes_no_others(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    own = tmp_path / "key.authority"
    own.write_bytes((tmp_path / "key").read_bytes())
    issue_key(tmp_path / "key", "forged", tmp_path / "forged")
    with pytest.raises(WhaleError, match="is not of the authority in it"):
        load_key(tmp_path / "forged")


def test_without_openssl_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(tmp_path / "key")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WhaleError, match="no command openssl here.*Install it, or"):
        make_key(tmp_path / "other")
    assert load_key(tmp_path / "key").name == "everyone"  # To use one takes none.
    assert not (tmp_path / "other").exists()


def test_an_openssl_that_never_ends_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "openssl"
    command.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(keys, "_SECONDS", 0.2)
    with pytest.raises(WhaleError, match="req made no key in 0 s. Try again"):
        make_key(tmp_path / "key")
    assert not (tmp_path / "key").exists()


def test_only_tls_of_this_version_is_spoken(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    key = load_key(tmp_path / "key")
    for context in (key.accepts, key.dials):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
