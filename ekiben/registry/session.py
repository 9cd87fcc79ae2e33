"""HTTP requests to one repository of a registry: retries, logins, certificates, proxies, and the errors that come of
them.

A registry names other hosts: of redirects, of uploads, of token servers. Each request is sent to
one origin (scheme, host and port), and what is secret goes to the registry's own, or to the token server that the
registry itself names: passwords, tokens, client certificates. Cookies are not kept, and ~/.netrc is not read.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlencode, urljoin, urlsplit

from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.decisions import log_decision
from ekiben.core.errors import FetchError, UsageError
from ekiben.core.paths import expand_home
from ekiben.registry._addresses import Origin, is_private, names_private, origin
from ekiben.registry.auth import Credentials, find_credentials
from ekiben.registry.reference import HUB, Reference

if TYPE_CHECKING:
    from ssl import SSLContext

    from requests import Response, Session

    from ekiben.registry._connection import Guard

MEDIA_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
TIMEOUT = (10, 120)  # seconds: to connect, between two pieces
PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before each further try
PATIENCE = 60.0  # seconds; a longer Retry-After is an error
MAX_MANIFEST = 4 << 20  # bytes; the spec's own limit
MAX_ERROR = 16 << 10  # bytes of an error's text that are read
MAX_REDIRECTS = 10
BUSY = {429, 500, 502, 503, 504}
_URL_CHARACTERS = "!#$%&'()*+,/:;=?@[]~"  # RFC 3986
_REDIRECTS = {301, 302, 303, 307, 308}
_TOKEN = re.compile(r"[\x21-\x7e]+")  # characters allowed in a header
_LOCAL = re.compile(r"^(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?$")


class BrokenConnection(Exception):
    """A connection that ended early, to be retried."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to ``url``: of the registry's API also its path below the repository.

    ``push``: with a login that may write; ``other``: a repository that it may read as well. ``secret`` is the
    Authorization header for the origin of ``url``; with ``may_leave`` a redirect may name another origin, which does
    not get it.
    """

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    data: bytes | None = None
    push: bool = False
    other: str = ""
    secret: str | None = None
    may_leave: bool = True


class RegistrySession:
    """Requests to one repository; threads may share it.

    Raises FetchError with the image, the answer of the registry, and a hint.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self._sessions, open_sessions = threading.local(), list["Session"]()
        self._open_sessions = open_sessions
        weakref.finalize(self, _close_all, open_sessions)
        self._contexts: dict[bool, SSLContext] = {}
        self._authorizations: dict[str, str] = {}
        # Reentrant: fetching a token may be this thread's first request to another host.
        self._lock = threading.RLock()
        self._base: str | None = None
        self._answered = False
        self._addresses: set[bool] = set()  # whether those of the registry were private

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
        """Ask a registry on this machine whether it uses http or https."""
        from requests import RequestException

        try:
            answer = self._session(at_registry=True).get(
                f"http://{host}/v2/", timeout=TIMEOUT, allow_redirects=False, stream=True
            )
        except RequestException:
            return "http"
        return "https" if answer.status_code == 400 and b"HTTPS" in self._read_error(answer) else "http"

    def absolute(self, location: str) -> str:
        """Return the URL of ``location``, which a registry may send as a path. Raises FetchError."""
        return self._join(self.base, location)

    def location(self, answer: Response) -> str:
        """Return the URL in a response's Location, "" where there is none. Raises FetchError."""
        location = answer.headers.get("Location", "")
        return self._join(answer.url, location) if location else ""

    def _join(self, url: str, location: str) -> str:
        try:
            # Bytes, as http.client decodes those of headers.
            return urljoin(url, quote(location.encode("latin-1"), safe=_URL_CHARACTERS))
        except ValueError as error:
            raise FetchError(
                f"{self.reference}: {self.reference.host} redirects to {location!r:.100}, which is not a URL"
            ) from error

    # -- addresses

    def _session(self, *, at_registry: bool) -> Session:
        """Return this thread's session: that of the registry, or that of other hosts."""
        name = "registry" if at_registry else "other"
        if not hasattr(self._sessions, name):
            from ekiben.registry._connection import Guard

            with self._lock:  # reading a machine's certificates takes 30 ms
                if at_registry not in self._contexts:
                    self._contexts[at_registry] = _trusted(self.reference.host, at_registry=at_registry)
            guard = Guard(self._note_address if at_registry else self._check_address, self._refuse_slow)
            session = _new_session(self.reference.host, self._contexts[at_registry], guard)
            setattr(self._sessions, name, session)
            self._open_sessions.append(session)
        return cast("Session", getattr(self._sessions, name))

    def _note_address(self, address: str) -> None:
        self._addresses.add(is_private(address))

    def _check_address(self, address: str) -> None:
        if is_private(address):
            self._check_private(address)

    def _check_private(self, host: str) -> None:
        """Raise FetchError when a registry on the internet redirects to a private address."""
        is_public = False in self._addresses
        if not self._addresses:  # behind a proxy, none is known
            is_public = not names_private(self._registry_origin[1])
        if is_public:
            raise FetchError(
                f"{self.reference}: {self.reference.host} is on the internet, and redirects to {host}, an address of"
                " this machine or of a private network"
            )

    def _refuse_slow(self, what: str) -> None:
        raise FetchError(
            f"{self.reference}: {self.reference.host} {what}",
            hint="the same command resumes a download; try again, or from another network",
        )

    def _origin(self, url: str) -> Origin:
        try:
            return origin(url)
        except ValueError as error:
            raise FetchError(
                f"{self.reference}: {self.reference.host} redirects to {url!r:.100}, which {error}"
            ) from error

    @property
    def _registry_origin(self) -> Origin:
        try:
            return origin(self.base)
        except ValueError as error:
            raise UsageError(
                f"{self.reference.host} is not the address of a registry",
                hint="as in registry.example.org/lab/name:tag",
            ) from error

    def _at_registry(self, url: str) -> bool:
        return self._origin(url) == self._registry_origin

    def _check_url(self, url: str) -> None:
        """Raise FetchError for a URL that a registry may not redirect to."""
        scheme, host, _ = self._origin(url)
        if scheme == "http" and self._registry_origin[0] == "https":
            raise FetchError(
                f"{self.reference}: {self.reference.host} redirects to {url.partition('?')[0]!r:.200}, in clear text"
            )
        if names_private(host):  # other hosts are checked when connected
            self._check_private(host)

    def _follow(self, request: Request) -> Response:
        """Send a request, and follow redirects where the method allows it: secrets stay with the origin of
        ``request.url``.

        Raises FetchError, BrokenConnection.
        """
        first = self._origin(request.url)
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._send(request, first)
            location = answer.headers.get("Location")
            if answer.status_code not in _REDIRECTS or location is None:
                return answer
            url = self._join(request.url, location)
            is_same = self._origin(url) == first
            if request.method not in ("GET", "HEAD") and not (is_same and answer.status_code in (307, 308)):
                return answer
            answer.close()
            if not (is_same or request.may_leave):
                raise FetchError(
                    f"{self.reference}: {request.url.partition('?')[0]} redirects to another host,"
                    f" {urlsplit(url).netloc}, which does not get your login"
                )
            request = replace(request, url=url)
        raise FetchError(f"{self.reference}: {self.reference.host} redirects more than {MAX_REDIRECTS} times")

    def _send(self, request: Request, first: Origin) -> Response:
        from requests import RequestException

        at_registry = self._at_registry(request.url)
        if not at_registry:
            self._check_url(request.url)
        try:
            return self._session(at_registry=at_registry).request(
                request.method,
                request.url,
                headers=dict(request.headers),
                data=request.data,
                stream=True,
                timeout=TIMEOUT,
                auth=_Header(request.secret, first),
                allow_redirects=False,
            )
        except RequestException as error:
            host = self.reference.host if at_registry else urlsplit(request.url).netloc
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise FetchError(
                    f"{self.reference}: the certificate of {host} is not trusted: {_reason(error)}",
                    hint=(
                        f"put your site's CA into /etc/docker/certs.d/{self.reference.host}/ca.crt, or name a bundle in"
                        " SSL_CERT_FILE"
                    ),
                ) from error
            if "WRONG_VERSION_NUMBER" in str(error) or "record layer failure" in str(error):
                raise FetchError(
                    f"{self.reference}: {host} does not speak https",
                    hint=f"to use its plain http: http://{self.reference}" if at_registry else None,
                ) from error
            raise BrokenConnection(_reason(error)) from error

    # -- requests to the registry

    def ask(
        self, request: Request, *, good: Sequence[int] = (200,), stream: bool = False, again: bool = True
    ) -> Response:
        """Send a request, and return the response when its status is in ``good``.

        With ``stream``, leave its body to the caller. With ``again``, repeat the request when the server is busy or the
        connection breaks. Raises FetchError, BrokenConnection.
        """
        scope = f"repository:{self.reference.repository}:{'pull,push' if request.push else 'pull'}"
        scope += f" repository:{request.other}:pull" if request.other else ""
        absolute = replace(request, url=self.absolute(request.url))
        for pause in (*PAUSES, None) if again else (None,):
            try:
                answer = self._authorized(absolute, scope)
            except BrokenConnection as error:
                if not again:
                    raise
                if pause is None or not self._answered:
                    raise FetchError(f"{self.reference}: {self.reference.host} does not answer: {error}") from error
                time.sleep(pause)
                continue
            self._answered = True
            if answer.status_code in good:
                if not stream:
                    self._read_error(answer)  # read to its end, so that the connection can be used again
                return answer
            if answer.status_code not in BUSY or pause is None or (pause := _asked_pause(answer, pause)) is None:
                raise self._refused(answer, request)
            answer.close()
            time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _authorized(self, request: Request, scope: str) -> Response:
        """Send a request, and again with a login after the registry's 401. Another host's 401 gets none."""
        known = self._authorizations.get(scope)
        for attempt in range(2):
            answer = self._follow(replace(request, secret=known if self._at_registry(request.url) else None))
            if answer.status_code != 401 or attempt or not self._at_registry(answer.url):
                return answer
            self._read_error(answer)
            with self._lock:
                if self._authorizations.get(scope) == known:
                    self._authorizations[scope] = self._authorize(answer.headers.get("WWW-Authenticate", ""), scope)
                known = self._authorizations[scope]
        return answer

    def _authorize(self, challenge: str, scope: str) -> str:
        """Return the header that answers a 401."""
        kind, _, rest = challenge.partition(" ")
        credentials = find_credentials(self.reference.host, self.reference.repository)
        log_decision(
            f"login at {self.reference.host}",
            credentials.source if credentials else "anonymous",
            f"for {self.reference.repository}" if credentials else "no file or variable has a login for it",
        )
        if kind.lower() == "basic":
            if credentials is None:
                raise self._unauthorized()
            return _basic(credentials)
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
        realm = asked["realm"]
        if credentials and credentials.token:
            form = {
                "grant_type": "refresh_token",
                "refresh_token": credentials.token,
                "client_id": "ekiben",
                "service": asked.get("service", ""),
                "scope": scope,
            }
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            request = Request("POST", realm, headers, urlencode(form).encode(), may_leave=False)
        else:
            query = [("service", asked["service"])] if "service" in asked else []
            query += [("scope", item) for item in scope.split(" ")]
            url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}"
            request = Request(
                "GET", url, secret=_basic(credentials) if credentials else None, may_leave=not credentials
            )
        answer = self._follow(request)
        if answer.status_code in (401, 403):
            answer.close()
            raise self._unauthorized(credentials)
        try:
            with answer:
                fields = Fields.of(parse_json(b"".join(self.received(answer, MAX_MANIFEST)), max_size=MAX_MANIFEST))
            return fields.matching("token" if fields.data.get("token") else "access_token", _TOKEN, "a token")
        except ValueError as error:
            raise FetchError(
                f"{self.reference}: {asked['realm']} returned no token: {answer.status_code} {answer.reason}"
            ) from error

    def _unauthorized(self, credentials: Credentials | None = None) -> FetchError:
        reason = (
            f"the login from {credentials.source} is refused"
            if credentials
            else "the registry requires a login, and you have none for it"
        )
        return FetchError(f"{self.reference}: access refused (401): {reason}", hint=_login(self.reference.host))

    def _refused(self, answer: Response, request: Request) -> FetchError:
        method, path = request.method, request.url
        code, text = answer.status_code, self._read_error(answer).decode(errors="replace")[:200]
        if not self._at_registry(answer.url):
            host = urlsplit(answer.url).netloc
            return FetchError(
                f"{self.reference}: {self.reference.host} redirects to {host}, which answers {code} {answer.reason}"
            )
        if code in _REDIRECTS:
            return FetchError(
                f"{self.reference}: {self.reference.host} redirects {method} elsewhere, which is not supported: {code}"
            )
        if code == 401:
            return self._unauthorized(find_credentials(self.reference.host, self.reference.repository))
        if code == 403:
            return FetchError(
                f"{self.reference}: access refused (403): this login may not"
                f" {'write' if method not in ('GET', 'HEAD') else 'read'} there",
                hint=_login(self.reference.host),
            )
        if code == 404:
            what = path.partition("?")[0] if "://" not in path else "its upload"
            return FetchError(f"{self.reference}: not there: {what}: 404 {answer.reason}")
        if code == 429:
            wait = f" (it asks for {answer.headers['Retry-After']} s)" if "Retry-After" in answer.headers else ""
            return FetchError(
                f"{self.reference}: {self.reference.host} answered 429: too many requests from this address{wait}; "
                "log in, or wait",
                hint=_login(self.reference.host),
            )
        return FetchError(
            f"{self.reference}: {method} {path.partition('?')[0]}: {code} {answer.reason}: {text}".rstrip(": ")
        )

    def _read_error(self, answer: Response) -> bytes:
        """Return the beginning of a body, and close the response; reading to the end keeps the connection open."""
        data = b""
        with answer, contextlib.suppress(BrokenConnection):
            for chunk in self.received(answer, None, piece=MAX_ERROR):
                data += chunk
                if len(data) >= MAX_ERROR:
                    break
        return data

    def read_small(self, path: str, size: int | None = None) -> bytes:
        """Return a small body: a manifest, a config, a signature, of ``size`` bytes where they are known."""
        limit = MAX_MANIFEST if size is None else size
        if limit > MAX_MANIFEST:
            raise FetchError(f"{self.reference}: {path} has {limit} bytes, more than {MAX_MANIFEST}")
        for pause in (*PAUSES, None):
            try:
                headers = {"Accept": ", ".join(MEDIA_MANIFESTS)}
                with self.ask(Request("GET", path, headers), stream=True) as answer:
                    return b"".join(self.received(answer, limit))
            except BrokenConnection as error:
                if pause is None:
                    raise FetchError(f"{self.reference}: {self.reference.host} broke off: {error}") from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def received(self, answer: Response, max_size: int | None, *, piece: int = 1 << 16) -> Iterator[bytes]:
        """Yield the body in pieces, at most ``max_size`` bytes.

        Raises FetchError for more, BrokenConnection when it ends early.
        """
        from requests import RequestException
        from urllib3.exceptions import HTTPError

        total = 0
        try:
            for chunk in answer.iter_content(piece):
                total += len(chunk)
                if max_size is not None and total > max_size:
                    raise FetchError(f"{self.reference}: the registry sends more than the expected {max_size} bytes")
                yield chunk
        except (RequestException, HTTPError, OSError) as error:
            raise BrokenConnection(str(error)) from error


class _Header:
    """Sends ``value`` to one origin only, and prevents logins from ~/.netrc or the URL."""

    def __init__(self, value: str | None, only: Origin) -> None:
        self._value, self._only = value, only

    def __call__(self, request: Any) -> Any:
        if self._value and origin(request.url) == self._only:  # compare the URL that is sent
            request.headers["Authorization"] = self._value
        return request


def _new_session(host: str, context: SSLContext, guard: Guard) -> Session:
    from http.cookiejar import DefaultCookiePolicy

    from requests import Session

    from ekiben.registry._connection import new_adapter

    class UnledSession(Session):
        def get_redirect_target(self, resp: Response) -> str | None:
            """Return none: to prepare the next request, which we do, it would read all of the body of this one."""
            return None

    session = UnledSession()
    session.headers["User-Agent"] = "ekiben"
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))  # they know no ports
    adapter = new_adapter(context, guard)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    if _LOCAL.match(host):
        session.trust_env = False  # no proxy reaches this machine
    return session


def _trusted(host: str, *, at_registry: bool) -> SSLContext:
    """Return a TLS context with the certificates of ``host``'s folders; with ``at_registry`` also the client's
    certificate, which other hosts do not see.
    """
    import ssl

    from ekiben.core.environment import ca_bundle

    bundle = ca_bundle()  # before OpenSSL opens SSL_CERT_FILE itself, and waits for a pipe
    context = ssl.create_default_context()
    if bundle:
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
        for certificate in sorted((expand_home(Path(folder), "certificates of registries") / host).glob("*.c*rt")):
            with contextlib.suppress(OSError, ValueError):
                if certificate.suffix == ".crt":
                    text = read_regular(certificate, follow=True).decode("ascii", "ignore")  # comments may have others
                    context.load_verify_locations(cadata=text)
                elif (
                    at_registry and certificate.is_file() and (key := certificate.with_suffix(".key")).is_file()
                ):  # .cert and .key: the client's certificate
                    context.load_cert_chain(certificate, key)
    return context


def _basic(credentials: Credentials) -> str:
    return "Basic " + base64.b64encode(f"{credentials.user}:{credentials.password}".encode()).decode()


def _close_all(sessions: Sequence[Session]) -> None:
    for session in sessions:
        session.close()


def _login(host: str) -> str:
    return f"docker login {host}, or apptainer registry login oras://{host}"


def _reason(error: Exception) -> str:
    """Return the innermost error's message."""
    while (inner := error.__cause__ or error.__context__) is not None and isinstance(inner, Exception):
        error = inner
    return str(error) or type(error).__name__


def _asked_pause(answer: Response, pause: float) -> float | None:
    asked = answer.headers.get("Retry-After", "")
    if not asked.isdecimal():
        return pause
    return float(asked) if float(asked) <= PATIENCE else None
