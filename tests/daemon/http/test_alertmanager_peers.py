"""Passing an alert on to the daemon of the node that its ``instance`` names."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from contextlib import ExitStack

import httpx
import pytest

from tests.daemon.http.alert_node import WEBHOOK, AlertNode, alert, notification, send
from tests.daemon.http.conftest import MemoryAgent, servers
from warpwatch_daemon.captures.alerts.peers import Peers
from warpwatch_daemon.captures.alerts.webhook import Alert, host_of
from warpwatch_daemon.config import loading
from warpwatch_daemon.http.forwarding import Forwarding, LocatedHosts
from warpwatch_telemetry.errors import UsageError

# Every address of 127.0.0.0/8 is this machine.
HERE, THERE, ELSEWHERE = "127.0.0.1", "127.0.0.2", "127.0.0.3"


@pytest.fixture
def names(monkeypatch):
    """What names resolve to: addresses, or how it fails. Others as ever."""
    known: dict[str, list[str] | OSError] = {}
    real = socket.getaddrinfo

    def resolve(host, *rest, **more):
        found = known.get(host)
        if found is None:
            return real(host, *rest, **more)
        if isinstance(found, OSError):
            raise found
        stream = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*stream, (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@pytest.fixture
def token(tmp_path):
    """The one of all daemons."""
    path = tmp_path / "token"
    path.write_text("correct horse")
    return path


def token_client(url: str) -> httpx.Client:
    headers = {"Authorization": "Bearer correct horse"}
    return httpx.Client(base_url=url, headers=headers, timeout=30)


@pytest.fixture
def nodes(tmp_path, token):
    """Starts two daemons; only the other one, at THERE, has ranks: (client of this, other)."""
    with ExitStack() as stack:

        def start(peers="http://{address}", other=(), **section):
            section.setdefault("token_file", token)
            section.setdefault("allow_plain_peers", True)
            there = AlertNode(tmp_path)
            there.begin(tmp_path / "there", stack)
            serve = stack.enter_context(servers(there))
            there_server = serve(listen=f"{THERE}:0", **{"token_file": token, **dict(other)})
            address = "{}:{}".format(*there_server.address)
            here = MemoryAgent(tmp_path)
            serve = stack.enter_context(servers(here))
            server = serve(
                peers=peers.format(address=address, port=address.rpartition(":")[2]), **section
            )
            return stack.enter_context(token_client(server.url)), there

        yield start


def test_an_alert_of_another_node_is_passed_on_to_its_daemon(nodes):
    client, there = nodes()
    answers = send(
        client,
        alert("f1", training_job="train", rank="1", instance=f"{THERE}:9400"),
        alert("f2", training_job="train", rank="3", instance=f"{THERE}:9400"),
        alert("f3", training_job="none", instance=f"{THERE}:9400"),
        alert("f4", training_job="train"),
    )
    (capture,) = there.captures()
    assert capture.request.ranks == (1, 3)
    assert [answer["outcome"] for answer in answers] == [*3 * ["forwarded"], "no_rank"]
    assert answers[0]["detail"] == f"{THERE}: captured"
    assert answers[0]["capture_id"] == capture.id
    said = f"{THERE}: no_rank: no running rank of job 'none' is known here"
    assert answers[2]["detail"] == said


def test_a_label_alone_names_no_peer(nodes):
    client, there = nodes()
    with socket.create_server((ELSEWHERE, 0)) as listener:
        listener.settimeout(0.3)
        host, port = listener.getsockname()
        answers = send(
            client,
            alert("f1", training_job="train", instance=f"{host}:{port}"),
            alert("f2", training_job="train", instance=f"{64 * 'x'}:80"),
            alert("f3", training_job="train", instance=f"{THERE}@{host}:{port}"),
        )
        with pytest.raises(TimeoutError):
            listener.accept()
    assert [answer["outcome"] for answer in answers] == 3 * ["no_rank"]
    assert there.codes == {}


def test_the_port_is_that_of_the_url_whatever_the_label_says(nodes):
    client, _ = nodes()
    with socket.create_server((THERE, 0)) as listener:
        instance = "{}:{}".format(*listener.getsockname())
        (answer,) = send(client, alert(training_job="train", instance=instance))
    assert answer["outcome"] == "forwarded"


def test_what_was_passed_on_goes_no_further(nodes):
    client, there = nodes()
    body = notification(alert(training_job="train", instance=f"{THERE}:9400"))
    answer = client.post(WEBHOOK, json=body, headers={"X-Warpwatch-Forwarded": "1"})
    assert answer.json()["alerts"][0]["outcome"] == "no_rank"
    assert there.codes == {}


def test_an_alert_of_a_job_on_both_nodes_goes_to_the_daemon_that_sees_it(tmp_path, token):
    """And where that one is gone, it is answered by whom it reaches."""
    with ExitStack() as stack:
        nodes = AlertNode(tmp_path), AlertNode(tmp_path)
        for number, node in enumerate(nodes):
            node.begin(tmp_path / str(number), stack)
        there = stack.enter_context(ExitStack())
        serve = there.enter_context(servers(nodes[1]))
        server = serve(listen=f"{THERE}:0", token_file=token)
        serve = stack.enter_context(servers(nodes[0]))
        peers = "http://{}:{}".format(*server.address)
        url = serve(peers=peers, token_file=token, allow_plain_peers=True).url
        client = stack.enter_context(token_client(url))
        of_job = alert("f1", training_job="train", kind="hang", instance=f"{THERE}:9400")
        of_rank = alert("f2", training_job="train", rank="0", instance=f"{THERE}:9400")
        outcomes = [answer["outcome"] for answer in send(client, of_job, of_rank)]
        assert outcomes == ["forwarded", "captured"]
        assert [capture.request.kind for capture in nodes[1].captures()] == ["stacks"]
        assert [capture.request.kind for capture in nodes[0].captures()] == ["torch"]
        there.close()
        another = alert("f3", training_job="train", kind="hang", instance=f"{THERE}:9400")
        assert send(client, another)[0]["outcome"] == "captured"
        assert nodes[0].counted("captured") == 2


def test_this_daemon_is_no_peer_of_its_own(nodes):
    client, _ = nodes(peers=f"http://{HERE}:1")
    (answer,) = send(client, alert(training_job="train", instance=f"{HERE}:9400"))
    assert answer["outcome"] == "no_rank"


def test_it_is_no_peer_of_its_own_where_it_listens_everywhere(nodes):
    """There the address of IPv4 comes wrapped: ``::ffff:127.0.0.1``."""
    client, _ = nodes(peers=f"http://{HERE}:1", listen=":0")
    with token_client(f"http://{HERE}:{client.base_url.port}") as over_ipv4:
        (answer,) = send(over_ipv4, alert(training_job="train", instance=f"{HERE}:9400"))
    assert answer["outcome"] == "no_rank"


@pytest.mark.parametrize(
    ("instance", "host"),
    [
        ("10.0.0.7:9400", "10.0.0.7"),
        ("[::ffff:10.0.0.7]:9400", "10.0.0.7"),
        ("[FD00:0:0::7]:9400", "fd00::7"),
        ("GPU-17.example:9400", "gpu-17.example"),
        ("gpu-17", "gpu-17"),
        ("", ""),
    ],
)
def test_a_host_has_one_spelling(instance, host):
    assert host_of(instance) == host


def test_the_host_may_be_a_name_of_a_peer(nodes, names):
    """As in a list of targets; who is a peer, the addresses decide."""
    client, there = nodes()
    names |= {"gpu-02": ["::1", THERE], "gpu-03": [ELSEWHERE], "gpu-01": [HERE]}
    names["gpu-04"] = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    firing = [
        alert(f"f{number}", training_job="train", instance=f"GPU-0{number}:9400")
        for number in (2, 3, 1, 4)
    ]
    answers = send(client, *firing)
    assert [answer["outcome"] for answer in answers] == ["forwarded", *3 * ["no_rank"]]
    assert answers[0]["detail"] == f"{THERE}: captured"
    assert there.codes == {200: 1}


def test_a_name_that_cannot_be_looked_up_now_is_asked_for_again(nodes, names):
    client, _ = nodes()
    names["gpu-02"] = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    firing = alert(training_job="train", instance="gpu-02:9400")
    (answer,) = send(client, firing, status=503)
    assert answer["outcome"] == "peer_failed"
    assert answer["detail"].startswith("gpu-02: ")
    names["gpu-02"] = [THERE]
    assert send(client, firing)[0]["outcome"] == "forwarded"


def test_a_peer_that_comes_back_gets_what_it_has_missed(tmp_path, token):
    with ExitStack() as stack:
        with socket.create_server((THERE, 0)) as listener:
            port = listener.getsockname()[1]
        serve = stack.enter_context(servers(MemoryAgent(tmp_path)))
        peers = f"http://{THERE}:{port}"
        url = serve(peers=peers, token_file=token, allow_plain_peers=True).url
        client = stack.enter_context(token_client(url))
        firing = alert(training_job="train", instance=f"{THERE}:9400")
        assert send(client, firing, status=503)[0]["outcome"] == "peer_failed"
        there = AlertNode(tmp_path)
        there.begin(tmp_path / "there", stack)
        stack.enter_context(servers(there))(listen=f"{THERE}:{port}", token_file=token)
        first, second = send(client, firing), send(client, firing)
        assert first == second
        assert first[0]["detail"] == f"{THERE}: captured"
        # It has been captured: the peer need not say so again.
        assert there.codes == {200: 1}


def test_more_nodes_than_one_webhook_is_passed_on_to_have_their_turn(nodes, names):
    client, there = nodes(peers="http://peers.example:{port}")
    # Only THERE answers; it is behind eight that are gone.
    hosts = [f"127.0.0.{number}" for number in range(10, 20)]
    names["peers.example"] = [*hosts, THERE]
    firing = [
        alert(host, training_job="train", rank="0", instance=f"{host}:9400")
        for host in (*hosts, THERE)
    ]
    assert send(client, *firing, status=503)[-1]["outcome"] == "peer_failed"
    assert there.codes == {}
    assert send(client, *firing, status=503)[-1]["outcome"] == "forwarded"


def test_what_peers_have_answered_takes_no_place_again(tmp_path, names):
    token = tmp_path / "token"
    token.write_text("correct horse\n")
    with ExitStack() as stack:
        there = AlertNode(tmp_path)
        there.begin(tmp_path / "there", stack)
        everywhere = stack.enter_context(servers(there))(listen="0.0.0.0:0", token_file=token)
        hosts = [f"127.0.0.{number}" for number in range(10, 22)]
        names["peers.example"] = hosts
        serve = stack.enter_context(servers(MemoryAgent(tmp_path)))
        peers = f"http://peers.example:{everywhere.address[1]}"
        url = serve(peers=peers, token_file=token, allow_plain_peers=True).url
        headers = {"Authorization": "Bearer correct horse"}
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=30))
        firing = [alert(host, training_job="train", instance=f"{host}:9400") for host in hosts]
        outcomes = [answer["outcome"] for answer in send(client, *firing, status=503)]
        assert outcomes == [*8 * ["forwarded"], *4 * ["peer_failed"]]
        assert {answer["outcome"] for answer in send(client, *firing)} == {"forwarded"}
        assert there.codes == {200: 12}


def test_a_peer_is_asked_again_for_what_it_has_not_captured(tmp_path, token):
    now = 0.0
    with ExitStack() as stack:
        there = AlertNode(tmp_path)
        there.begin(tmp_path / "there", stack)
        server = stack.enter_context(servers(there))(listen=f"{THERE}:0", token_file=token)
        peers = Peers("http://{}:{}".format(*server.address), token, None)
        forwarding = Forwarding(peers, lambda: now)
        alerts = [
            Alert(
                status="firing",
                labels={"training_job": job, "instance": f"{THERE}:9400"},
                starts_at="",
                fingerprint=job,
            )
            for job in ("train", "none")
        ]
        asyncio.run(forwarding.pass_on(alerts, LocatedHosts(frozenset(), {THERE: THERE}, {})))
    captured, refused = alerts
    assert [forwarding.earlier_answer(alert) is None for alert in alerts] == [False, False]
    now = 241.0
    assert forwarding.earlier_answer(refused) is None
    known = forwarding.earlier_answer(captured)
    assert known is not None and known.capture_id == there.captures()[0].id
    now = 5 * 86400 + 1.0
    assert forwarding.earlier_answer(captured) is None


def test_peers_that_do_not_answer_do_not_keep_names_from_being_looked_up(names):
    hosts = [f"127.0.0.{number}" for number in range(10, 18)]
    names["peers.example"] = hosts

    async def look_up_beside(listener: socket.socket) -> LocatedHosts:
        url = f"http://peers.example:{listener.getsockname()[1]}"
        forwarding = Forwarding(Peers(url, None, None))
        located = LocatedHosts(frozenset(), {host: host for host in hosts}, {})
        alerts = [Alert(status="firing", labels={"instance": host}, starts_at="") for host in hosts]
        asking = asyncio.ensure_future(forwarding.pass_on(alerts, located))
        connections = [(await asyncio.to_thread(listener.accept))[0] for _ in hosts]
        found = await forwarding.locate(hosts[:1], HERE)
        for connection in connections:
            connection.close()
        await asking
        return found

    with socket.create_server(("0.0.0.0", 0), backlog=16) as listener:
        listener.settimeout(30)
        found = asyncio.run(look_up_beside(listener))
    assert found == LocatedHosts(frozenset({HERE}), {hosts[0]: hosts[0]}, {})


def test_daemons_know_each_other_by_their_token(nodes, tmp_path):
    token = tmp_path / "token"
    token.write_text("correct horse\n")
    firing = alert(training_job="train", instance=f"{THERE}:9400")
    client, _ = nodes(other={"token_file": token}, token_file=token)
    client.headers["Authorization"] = "Bearer correct horse"
    assert send(client, firing)[0]["outcome"] == "forwarded"
    # A changed file is read again.
    token.write_text("another horse\n")
    client.headers["Authorization"] = "Bearer another horse"
    other = alert("f2", training_job="train", instance=f"{THERE}:9400")
    assert send(client, other)[0]["outcome"] == "forwarded"


def test_a_peer_that_refuses_is_reported(nodes, tmp_path):
    another = tmp_path / "another"
    another.write_text("battery staple")
    client, there = nodes(other={"token_file": another})
    (answer,) = send(client, alert(training_job="train", instance=f"{THERE}:9400"), status=503)
    assert (answer["outcome"], answer["detail"]) == ("peer_failed", f"{THERE}: it answers 401")
    assert there.captures() == []


def test_a_peer_that_is_gone_costs_its_own_alerts_only(nodes):
    with socket.create_server((THERE, 0)) as listener:
        gone = "{}:{}".format(*listener.getsockname())
    client, _ = nodes(peers=f"http://{gone}")
    instances = [f"{THERE}:9400", f"{ELSEWHERE}:9400"]
    firing = [alert(training_job="train", instance=one) for one in instances]
    answers = send(client, *firing, status=503)
    assert [answer["outcome"] for answer in answers] == ["peer_failed", "no_rank"]
    assert answers[0]["detail"].startswith(f"{THERE}: ")


def test_a_name_that_does_not_resolve_is_reported(nodes):
    # No label of a name has more than 63 characters: no resolver is asked.
    name = 64 * "x"
    client, _ = nodes(peers=f"http://{name}:9400")
    firing = alert(training_job="train", instance=f"{THERE}:9400")
    (answer,) = send(client, firing, status=503)
    assert answer["outcome"] == "peer_failed"
    assert answer["detail"].startswith(f"http.peers: {name}: ")


@pytest.mark.parametrize(
    ("http", "is_refused"),
    [
        ({"peers": "http://peers:9400", "token_file": "/t"}, True),
        ({"peers": "http://peers:9400", "token_file": "/t", "allow_plain_peers": True}, False),
        ({"peers": "https://peers:9400", "token_file": "/t"}, False),
        ({"peers": "http://peers:9400"}, False),
    ],
)
def test_no_token_goes_to_peers_in_plain_text_unless_that_is_allowed(http, is_refused):
    if not is_refused:
        assert loading.parse({"http": http}, "the test").http.peers == http["peers"]
        return
    with pytest.raises(UsageError, match="allow_plain_peers: true"):
        loading.parse({"http": http}, "the test")


@pytest.mark.parametrize(
    "url", ["peers:9400", "ftp://peers", "http://", "http://me@peers", "http://peers/path"]
)
def test_what_names_no_peers_is_refused_at_the_start(url):
    with pytest.raises(UsageError, match=r"http\.peers"):
        loading.parse({"http": {"peers": url}}, "the test")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Of the name ``localhost``, its own authority."""
    folder = tmp_path_factory.mktemp("certificate")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 "
        "-subj /CN=peers -addext subjectAltName=DNS:localhost "
        f"-keyout {folder}/peers.key -out {folder}/peers.crt"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    (folder / "web.yml").write_text(
        "tls_server_config: {cert_file: peers.crt, key_file: peers.key}\n"
    )
    return folder


@pytest.mark.parametrize("trusted", [True, False])
def test_over_tls_the_certificate_is_of_the_name_not_of_the_address(
    tmp_path, token, certificate, trusted
):
    with ExitStack() as stack:
        there = AlertNode(tmp_path)
        there.begin(tmp_path / "there", stack)
        serve = stack.enter_context(servers(there))
        web = certificate / "web.yml"
        _, port = serve(listen=f"{HERE}:0", web_config=web, token_file=token).address
        serve = stack.enter_context(servers(MemoryAgent(tmp_path)))
        authority = {"peers_ca_file": certificate / "peers.crt"} if trusted else {}
        peers = {"peers": f"https://localhost:{port}", "token_file": token, **authority}
        with token_client(serve(listen=f"{THERE}:0", **peers).url) as client:
            firing = alert(training_job="train", instance=f"{HERE}:9400")
            (answer,) = send(client, firing, status=200 if trusted else 503)
    if trusted:
        assert (answer["outcome"], answer["detail"]) == ("forwarded", f"{HERE}: captured")
    else:
        assert answer["outcome"] == "peer_failed"
        assert "CERTIFICATE_VERIFY_FAILED" in answer["detail"]
        assert there.captures() == []
