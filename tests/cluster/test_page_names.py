"""Which web pages may use the dashboard."""

from types import SimpleNamespace

import dask.config
import pytest
from tornado.httputil import HTTPHeaders, HTTPServerRequest, RequestStartLine
from tornado.web import Application, RequestHandler

from libra.cluster.page_names import SETTING, check_names, refusal

MACHINE, ADDED = frozenset({"localhost", "node7", "node7.cluster"}), frozenset({"gateway.example"})


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8787", None),
        ("127.0.0.1:8787", "http://127.0.0.1:8787"),
        ("[::1]:8787", "http://[::1]:8787"),
        ("node7:8787", "http://node7:8787"),
        ("NODE7.cluster.:8787", "http://node7.cluster.:8787"),
        ("run.localhost:8787", None),
        ("gateway.example", "https://gateway.example"),
        ("127.0.0.1:8787", "https://gateway.example"),  # a proxy that changes Host
    ],
)
def test_a_page_of_this_machine_is_allowed(host, origin):
    assert refusal(host, origin, MACHINE, ADDED) is None


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example:8787", None),  # rebound to 127.0.0.1
        ("evil.example:8787", "http://evil.example:8787"),
        ("node7.evil.example", None),
        ("127.0.0.1.evil.example", None),
        ("[", None),
        ("127.0.0.1:8787", "http://evil.example"),
        ("127.0.0.1:8787", "http://127.0.0.1:9000"),  # another server of this machine
        ("127.0.0.1:8787", "null"),
        ("127.0.0.1:8787", ""),
        ("127.0.0.1:8787", "http://127.0.0.1:8787.evil.example"),
    ],
)
def test_another_page_is_refused(host, origin):
    assert refusal(host, origin, MACHINE, ADDED) is not None


@pytest.fixture
def answers():
    """Whether an application answers a request for a path under a name."""

    def ask(pages, path, host):
        connection = SimpleNamespace(set_close_callback=lambda callback: None)
        line, headers = RequestStartLine("GET", path, "HTTP/1.1"), HTTPHeaders({"Host": host})
        request = HTTPServerRequest(start_line=line, headers=headers, connection=connection)
        return pages.find_handler(request).handler_class is RequestHandler

    return ask


def dashboard():
    return Application([(r"/(.*)", RequestHandler)])


def test_of_a_scheduler_of_others_only_libras_pages_are_checked(answers):
    shared, own = dashboard(), dashboard()
    with dask.config.set({SETTING: None}):  # a local cluster of another test sets it in this process
        check_names(shared, shared=True)
    check_names(own)
    check_names(own, shared=True)  # a run comes to it
    for path in ("/libra", "/libra/state.json", "/prefix/libra/ws", "/prefix/libra?x=1"):
        assert not answers(shared, path, "proxy.example") and not answers(own, path, "proxy.example")
        assert answers(shared, path, "127.0.0.1:8787")
    for path in ("/status", "/status/ws", "/libraries", "/health"):
        assert answers(shared, path, "proxy.example") and not answers(own, path, "proxy.example")


def test_names_in_the_configuration_of_dask_are_for_all_pages(answers):
    pages = dashboard()
    with dask.config.set({SETTING: ["proxy.example"]}):
        check_names(pages, shared=True)
    assert answers(pages, "/libra", "proxy.example") and answers(pages, "/status", "proxy.example")
    assert not answers(pages, "/status", "evil.example")
