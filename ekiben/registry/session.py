"""HTTP requests to one repository of a registry: retries, logins, certificates, proxies, and the errors that come of them."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urljoin, urlsplit

from ekiben.core.checked import Fields, parse_json
from ekiben.core.decisions import log_decision
from ekiben.core.errors import FetchError
from ekiben.registry.auth import Credentials, find_credentials
from ekiben.registry.reference import HUB, Reference

if TYPE_CHECKING:
    from ssl import SSLContext

    from requests import Response, Session

MEDIA_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json",
)  # fmt: skip
TIMEOUT = (10, 120)  # seconds: to connect, between two pieces
PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before each further try
PATIENCE = 60.0  # seconds; who asks for a longer pause is not waited for
MAX_MANIFEST = 4 << 20  # bytes; the spec's own limit
BUSY = {429, 500, 502, 503, 504}
_TOKEN = re.compile(r"[\x21-\x7e]+")  # what may stand in a header
_LOCAL = re.compile(r"^(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?$")


class BrokenConnection(Exception):
    """A connection that ended early: worth another try."""


class RegistrySession:
    """Requests to one repository; threads may share it. Raises FetchError with the image, the answer of the registry, and a hint."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self._sessions, open_sessions = threading.local(), list["Session"]()
        self._open_sessions = open_sessions
        weakref.finalize(self, _close_all, open_sessions)
        self._authorizations: dict[str, str] = {}
        self._lock = threading.Lock()
        self._base: str | None = None
        self._answered = False

    @property
    def base(self) -> str:
        """Return the URL that paths of the registry's API begin with."""
        if self._base is None:
            host = "registry-1.docker.io" if self.reference.host == HUB else self.reference.host
            scheme = self.reference.scheme or ("https" if not _LOCAL.match(host) else self._local_scheme(host))
            self._base = f"{scheme}://{host}/v2/{self.reference.repository}/"
            reason = (
                "given in the reference"
                if self.reference.scheme
                else "on this machine"
                if _LOCAL.match(host)
                else "default"
            )
            log_decision(f"protocol of {self.reference.host}", scheme, reason)
        return self._base

    def _local_scheme(self, host: str) -> str:
        """A registry on this machine may speak either."""
        from requests import RequestException

        try:
            answer = self._session().get(f"http://{host}/v2/", timeout=TIMEOUT, allow_redirects=False)
        except RequestException:
            return "http"
        return "https" if answer.status_code == 400 and "HTTPS" in answer.text[:1000] else "http"

    def absolute(self, location: str) -> str:
        """Return the URL of ``location``, which a registry may send as a path."""
        return urljoin(self.base, location)

    def _session(self) -> Session:
        if not hasattr(self._sessions, "session"):
            self._sessions.session = _new_session(self.reference.host)
            self._open_sessions.append(self._sessions.session)
        return cast("Session", self._sessions.session)

    def ask(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, data: bytes | None = None, stream: bool = False,
        good: Sequence[int] = (200,), push: bool = False, other: str = "", again: bool = True,
    ) -> Response:  # fmt: skip
        """Send a request, and return the response when its status is in ``good``.

        With ``again``, it is repeated when the server is busy or the connection breaks. Raises FetchError, BrokenConnection.
        """
        scope = f"repository:{self.reference.repository}:{'pull,push' if push else 'pull'}"
        scope += f" repository:{other}:pull" if other else ""
        for pause in (*PAUSES, None) if again else (None,):
            try:
                answer = self._authorized(method, self.absolute(path), scope, headers or {}, data, stream)
            except BrokenConnection as error:
                if not again:
                    raise
                if pause is None or not self._answered:
                    raise FetchError(f"{self.reference}: {self.reference.host} does not answer: {error}") from error
                time.sleep(pause)
                continue
            self._answered = True
            if answer.status_code in good:
                return answer
            if answer.status_code not in BUSY or pause is None or (pause := _asked_pause(answer, pause)) is None:
                with answer:
                    raise self._refused(answer, method, path)
            answer.close()
            time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _authorized(
        self, method: str, url: str, scope: str, headers: Mapping[str, str], data: bytes | None, stream: bool
    ) -> Response:
        from requests import RequestException

        known = self._authorizations.get(scope)
        try:
            for attempt in range(2):
                answer = self._session().request(
                    method, url, headers=dict(headers), data=data, stream=stream, timeout=TIMEOUT,
                    auth=_Header(known, urlsplit(self.base).netloc), allow_redirects=method in ("GET", "HEAD"),
                )  # fmt: skip
                if answer.status_code != 401 or attempt:
                    return answer
                answer.close()
                with self._lock:
                    if self._authorizations.get(scope) == known:
                        self._authorizations[scope] = self._authorize(answer.headers.get("WWW-Authenticate", ""), scope)
                    known = self._authorizations[scope]
            return answer
        except RequestException as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise FetchError(f"{self.reference}: the certificate of {self.reference.host} is not trusted: {_reason(error)}",
                                 hint=f"put your site's CA into /etc/docker/certs.d/{self.reference.host}/ca.crt, or name a bundle in "
                                      "SSL_CERT_FILE") from error  # fmt: skip
            if "WRONG_VERSION_NUMBER" in str(error) or "record layer failure" in str(error):
                raise FetchError(f"{self.reference}: {self.reference.host} does not speak https",
                                 hint=f"if its plain http is what you want: http://{self.reference}") from error  # fmt: skip
            raise BrokenConnection(_reason(error)) from error

    def _authorize(self, challenge: str, scope: str) -> str:
        """The header that answers a 401."""
        kind, _, rest = challenge.partition(" ")
        credentials = find_credentials(self.reference.host, self.reference.repository)
        log_decision(f"login at {self.reference.host}", credentials.source if credentials else "anonymous",
                     f"for {self.reference.repository}" if credentials else "no file or variable has a login for it")  # fmt: skip
        if kind.lower() == "basic":
            if credentials is None:
                raise self._nobody()
            return "Basic " + base64.b64encode(f"{credentials.user}:{credentials.password}".encode()).decode()
        asked = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if kind.lower() != "bearer" or "realm" not in asked:
            raise FetchError(
                f"{self.reference}: the registry asks for an unsupported kind of login: {challenge or 'none named'}"
            )
        if not asked["realm"].startswith("https://") and self.base.startswith("https://"):
            raise FetchError(
                f"{self.reference}: the registry asks to send the password in clear text to {asked['realm']}"
            )
        return f"Bearer {self._token(asked, scope, credentials)}"

    def _token(self, asked: Mapping[str, str], scope: str, credentials: Credentials | None) -> str:
        query = [(key, asked[key]) for key in ("service",) if key in asked] + [
            ("scope", item) for item in scope.split(" ")
        ]
        if credentials and credentials.token:
            form = {"grant_type": "refresh_token", "refresh_token": credentials.token, "client_id": "ekiben",
                    "service": asked.get("service", ""), "scope": scope}  # fmt: skip
            answer = self._session().post(asked["realm"], data=form, timeout=TIMEOUT)
        else:
            basic = (credentials.user, credentials.password) if credentials else None
            answer = self._session().get(asked["realm"], params=query, auth=basic or _Header(None, ""), timeout=TIMEOUT)
        if answer.status_code in (401, 403):
            raise self._nobody(credentials)
        try:
            fields = Fields.of(parse_json(answer.content, max_size=MAX_MANIFEST))
            return fields.matching("token" if fields.data.get("token") else "access_token", _TOKEN, "a token")
        except ValueError as error:
            raise FetchError(
                f"{self.reference}: {asked['realm']} gives no token: {answer.status_code} {answer.reason}"
            ) from error

    def _nobody(self, credentials: Credentials | None = None) -> FetchError:
        reason = (
            f"the login from {credentials.source} is refused"
            if credentials
            else "the registry requires a login, and you have none for it"
        )
        return FetchError(f"{self.reference}: access refused (401): {reason}", hint=_login(self.reference.host))

    def _refused(self, answer: Response, method: str, path: str) -> FetchError:
        code = answer.status_code
        if code == 401:
            return self._nobody(find_credentials(self.reference.host, self.reference.repository))
        if code == 403:
            return FetchError(f"{self.reference}: access refused (403): this login may not {'write' if method not in ('GET', 'HEAD') else 'read'} "
                              f"there", hint=_login(self.reference.host))  # fmt: skip
        if code == 404:
            what = path.partition("?")[0] if "://" not in path else "its upload"
            return FetchError(f"{self.reference}: not there: {what}: 404 {answer.reason}")
        if code == 429:
            wait = f" (it asks for {answer.headers['Retry-After']} s)" if "Retry-After" in answer.headers else ""
            return FetchError(f"{self.reference}: {self.reference.host} answered 429: too many requests from this address{wait}; "
                              "log in, or wait", hint=_login(self.reference.host))  # fmt: skip
        text = "" if method == "HEAD" else answer.text[:200]
        return FetchError(
            f"{self.reference}: {method} {path.partition('?')[0]}: {code} {answer.reason}: {text}".rstrip(": ")
        )

    def read_small(self, path: str) -> bytes:
        """Return a body that fits into memory: a manifest, a config, a signature."""
        for pause in (*PAUSES, None):
            try:
                with self.ask("GET", path, headers={"Accept": ", ".join(MEDIA_MANIFESTS)}, stream=True) as answer:
                    return b"".join(self.received(answer, MAX_MANIFEST))
            except BrokenConnection as error:
                if pause is None:
                    raise FetchError(f"{self.reference}: {self.reference.host} broke off: {error}") from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def received(self, answer: Response, max_size: int | None) -> Iterator[bytes]:
        """Yield the body in pieces, at most ``max_size`` bytes. Raises FetchError for more, BrokenConnection when it ends early."""
        from requests import RequestException
        from urllib3.exceptions import HTTPError

        total = 0
        try:
            for chunk in answer.iter_content(1 << 20):
                total += len(chunk)
                if max_size is not None and total > max_size:
                    raise FetchError(
                        f"{self.reference}: the registry sends more than the {max_size} bytes there should be"
                    )
                yield chunk
        except (RequestException, HTTPError, OSError) as error:
            raise BrokenConnection(str(error)) from error


class _Header:
    """Sends what we know to the registry itself, and keeps requests from adding what ~/.netrc says."""

    def __init__(self, value: str | None, host: str) -> None:
        self._value, self._host = value, host

    def __call__(self, request: Any) -> Any:
        if self._value and urlsplit(request.url).netloc == self._host:
            request.headers["Authorization"] = self._value
        return request


def _new_session(host: str) -> Session:
    from requests import Session
    from requests.adapters import HTTPAdapter

    context = _trusted(host)

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **options: Any) -> Any:
            return super().init_poolmanager(*args, ssl_context=context, **options)

        def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
            return super().proxy_manager_for(*args, ssl_context=context, **options)

    session = Session()
    session.headers["User-Agent"] = "ekiben"
    session.mount("https://", Adapter())
    if _LOCAL.match(host):
        session.trust_env = False  # no proxy leads here
    return session


def _trusted(host: str) -> SSLContext:
    import ssl

    from ekiben.core.environment import ca_bundle

    context = ssl.create_default_context()
    if bundle := ca_bundle():
        context.load_verify_locations(bundle)
    log_decision(
        "CA bundle",
        bundle or "OpenSSL's default",
        "SSL_CERT_FILE" if str(bundle) == os.environ.get("SSL_CERT_FILE") else "this machine's",
    )
    for folder in (
        "/etc/docker/certs.d",
        "/etc/containers/certs.d",
        "~/.config/containers/certs.d",
        "~/.docker/certs.d",
    ):
        for certificate in sorted((Path(folder).expanduser() / host).glob("*.c*rt")):
            with contextlib.suppress(OSError):
                if certificate.suffix == ".crt":
                    context.load_verify_locations(certificate)
                elif (key := certificate.with_suffix(".key")).exists():  # .cert and .key: who we are
                    context.load_cert_chain(certificate, key)
    return context


def _close_all(sessions: Sequence[Session]) -> None:
    for session in sessions:
        session.close()


def _login(host: str) -> str:
    return f"docker login {host}, or apptainer registry login oras://{host}"


def _reason(error: Exception) -> str:
    """What went wrong at the bottom, without the layers of wrapping above it."""
    while (inner := error.__cause__ or error.__context__) is not None and isinstance(inner, Exception):
        error = inner
    return str(error) or type(error).__name__


def _asked_pause(answer: Response, pause: float) -> float | None:
    asked = answer.headers.get("Retry-After", "")
    if not asked.isdecimal():
        return pause
    return float(asked) if float(asked) <= PATIENCE else None
