"""Sessions in a real browser: links, their end, and other sites."""

from typing import Any

from tests.browser import NEEDS_BROWSER, browser, open_page
from tests.daemon.http.conftest import link_to
from tests.exporters.receiver import http_server

pytestmark = NEEDS_BROWSER
__all__ = ["browser"]
HOSTILE = """<form method="post" action="{target}/logout"><button>x</button></form>
<script>
const ask = (path) => fetch("{target}" + path,
  {{method: "POST", mode: "no-cors", credentials: "include", body: '{{"job":"a"}}'}});
Promise.allSettled([ask("/api/v1/captures"), ask("/logout")])
  .then(() => document.title = "done");
</script>"""


def heading(page: Any, name: str) -> None:
    page.get_by_role("heading", name=name).wait_for()


def test_a_session_that_was_signed_out_or_ended_by_a_restart_shows_the_login(
    browser, serve, tmp_path
):
    (tmp_path / "token").write_text("correct horse")
    section = {"token_file": tmp_path / "token"}
    server = serve(**section)
    complaints: list[str] = []
    page = open_page(browser, server.url.rstrip("/") + link_to(server), complaints)
    page.get_by_role("button", name="Sign out").click()
    heading(page, "Sign in with a link")
    page.get_by_role("textbox", name="Token").fill("correct horse")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name="Sign out").wait_for()
    # The page that is open asks again every two seconds, with the cookie of another daemon's life.
    (cookie,) = page.context.cookies()
    page.context.clear_cookies()
    page.context.add_cookies([cookie | {"value": "x" * 43}])
    heading(page, "Sign in with a link")


def test_a_page_of_another_port_of_the_host_changes_nothing(browser, serve, agent):
    """The same site for a browser, which sends the cookie: only the origin tells it apart."""
    server = serve()
    complaints: list[str] = []
    own = server.url.rstrip("/")
    page = open_page(browser, own + link_to(server), complaints)
    hostile = HOSTILE.format(target=own).encode()
    with http_server(lambda *_: (200, {"Content-Type": "text/html"}, hostile)) as other:
        page.goto(other)
        page.wait_for_function("document.title === 'done'")
        page.get_by_role("button").click()
        page.wait_for_url(f"{own}/logout")
        assert "foreign_origin" in page.content()
    assert agent.asked == []
    page.goto(own)
    page.get_by_role("button", name="Sign out").wait_for()
