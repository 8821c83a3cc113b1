"""Who may connect to the gateway, how often, and to which sessions; TLS; what its log says."""
import asyncio
import contextlib
import hmac
import json
import os
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import trustme
from camera_paths import INTRINSICS, mounted
from fake_service import FakeService, wait_for
from gateway_rig import TIMEOUT, client, gateway, get, heard, infer, robot, say
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from worldmodel_ros.serving.gateway.accounts import AccountError, Account, Accounts, digest, new_token
from worldmodel_ros.serving.gateway import security, server
from worldmodel_ros.serving.gateway.camera import PATH
from worldmodel_ros.serving.gateway.msgpack import encode
from worldmodel_ros.serving.gateway.process import GatewayError, Options
from worldmodel_ros.serving.gateway.security import AuditLog, server_context
from worldmodel_ros.serving.transport.address import is_loopback
from worldmodel_ros.serving.gateway.server import Limits

SMALL = np.zeros((8, 8, 3), np.uint8)
ARM, BASE, CERTIFIED = (new_token() for _ in range(3))
ACCOUNTS = Accounts((
    Account('arm', digest(ARM), sessions=2), Account('base', digest(BASE), messages=2.0, openings=0.5),
    Account('certified', digest(CERTIFIED), certificate='cell 7'), Account('only_certified', certificate='cell 8')))


@pytest.fixture(scope='module')
def audit_file(tmp_path_factory):
    return tmp_path_factory.mktemp('audit') / 'audit.jsonl'


@pytest.fixture(scope='module')
def running(tmp_path_factory, audit_file):
    audit = AuditLog(audit_file)
    with gateway(tmp_path_factory.mktemp('run'), FakeService(sessions=40), accounts=ACCOUNTS, audit=audit,
                 origins=('https://cell.example',), limits=Limits(linger=60.0)) as started:
        yield started
    audit.close()


def status_of(running, **options):
    with pytest.raises(InvalidStatus) as refused, client(running, **options):
        pass
    return refused.value.response.status_code


@pytest.mark.parametrize('header', [
    '', 'Bearer', 'Bearer ', f'Bearer {ARM}x', f'Bearer {ARM[:-1]}', f'Basic {ARM}', f'Token {ARM}', 'Bearer ' + 'x' * 3000,
    f'Bearer {digest(ARM)}', f'Bearer {CERTIFIED}', 'Bearer \x7f'], ids=range(11))  # tokens are drawn by each process
def test_only_a_known_token_opens_anything(running, header):
    assert ACCOUNTS.find(header, '') is None
    with contextlib.closing(socket.create_connection(('127.0.0.1', running.port), TIMEOUT)) as connected:
        connected.sendall(f'GET /v1/sessions HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\n\r\n'.encode('latin-1'))
        answer = b''.join(iter(lambda: connected.recv(4096), b''))
    assert b'sessions":' not in answer and (answer == b'' or answer.split()[1] in (b'401', b'400'))


def test_both_schemes_are_taken_in_any_case(running):
    for scheme in ('Bearer', 'bearer', 'Api-Key', 'API-KEY'):
        assert ACCOUNTS.find(f'{scheme} {ARM}', '').name == 'arm'
    assert ACCOUNTS.find(f'Bearer {CERTIFIED}', 'cell 7').name == 'certified'
    assert ACCOUNTS.find(f'Bearer {CERTIFIED}', 'cell 8').name == 'only_certified'
    assert ACCOUNTS.find('', 'cell 7') is None


@pytest.mark.parametrize('path', ['/', '/v1/realtime/robot/openpi', '/metrics', '/v1/models', '/v1/sessions', '/readyz', '/x'])
def test_every_path_but_one_wants_a_token(running, path):
    status, headers, _ = get(running, path)
    assert status == 401 and headers['WWW-Authenticate'] == 'Bearer'
    assert status_of(running, path=path) == 401
    assert get(running, '/healthz')[::2] == (200, 'OK\n')


def test_tools_get_their_answers(running):
    with robot(running, token=ARM) as connection:
        infer(connection, session_id='seen')
        infer(connection, session_id='seen', **{'observation/image': 3})
        assert get(running, '/readyz', ARM)[0] == 200
        assert json.loads(get(running, '/v1/models', ARM)[2])['data'][0]['id'] == 'tiny'
        status, headers, text = get(running, '/metrics', ARM)
        assert status == 200 and headers['Content-Type'].startswith('text/plain; version=0.0.4')
        values = dict(line.rsplit(' ', 1) for line in text.splitlines() if not line.startswith('#'))
        assert values['worldmodel_gateway_ticks_total{tier="two_step"}'] == '1' and values['worldmodel_engine_up'] == '1'
        assert values['worldmodel_gateway_refused_total{kind="observation"}'] == '1'
        assert values['worldmodel_gateway_connections'] == '1' and float(values['worldmodel_gateway_tick_seconds_count']) == 1
        seen, = json.loads(get(running, '/v1/sessions', ARM)[2])['sessions']
        assert (seen['session_id'], seen['connected'], seen['ticks'], seen['tier_two_step']) == ('seen', True, 1, 1)
        assert json.loads(get(running, '/v1/sessions', BASE)[2]) == {'sessions': [], 'engine': True}
        assert get(running, '/v1/other', ARM)[0] == 404


def test_no_session_is_reached_with_another_token(running):
    with robot(running, token=ARM) as owner, robot(running, token=BASE) as other:
        assert infer(owner, session_id='shared', step_id=7)['step_id'] == 7
        ticks = len(running.service.ticks)
        stranger = infer(other, session_id='shared', step_id=7)  # its own session of that name
        assert stranger['step_id'] == 7 and len(running.service.ticks) == ticks + 1
        assert infer(owner, session_id='shared', step_id=8)['episode'] == 1
    names = [(each.account.name, each.name) for each in running.gateway.sessions.all()]
    assert {('arm', 'shared'), ('base', 'shared')} <= set(names)


def test_an_account_has_so_many_sessions_messages_and_openings(running):
    with robot(running, token=ARM) as one, robot(running, token=ARM) as two, robot(running, token=ARM) as three:
        assert infer(one, session_id='a')['valid_steps'] and infer(two, session_id='b')['valid_steps']
        assert 'refused: sessions: 2 sessions are open' in infer(three, session_id='c')
    with robot(running, token=BASE) as connection:
        replies = [infer(connection, session_id=f's{k}') for k in range(12)]
    refusals = [reply for reply in replies if isinstance(reply, str)]
    assert any('base sends too much' in each for each in refusals)
    assert all('refused: rate' in each or 'refused: sessions' in each for each in refusals)


def test_a_session_that_waits_is_not_replaced_by_one_that_is_refused(tmp_path):
    accounts = Accounts((Account('arm', digest(ARM), sessions=1, openings=0.01),))
    with gateway(tmp_path, accounts=accounts) as running:
        with robot(running, token=ARM) as connection:
            assert infer(connection, session_id='waits', step_id=1)['valid_steps']
        wait_for(lambda: not running.gateway._clients)
        with robot(running, token=ARM) as connection:
            assert 'refused: sessions: arm opens sessions too often' in infer(connection, session_id='new')
            assert infer(connection, session_id='waits', step_id=2)['valid_steps']
        assert not running.service.closed


def test_an_account_that_leaks_connections_locks_out_no_other(running, monkeypatch):
    monkeypatch.setattr(server, '_SPARE', 1)
    with contextlib.ExitStack() as stack:
        wait_for(lambda: not running.gateway._clients)
        for _ in range(3):  # it may have two sessions
            stack.enter_context(robot(running, token=ARM))
        with pytest.raises(InvalidStatus) as refused, robot(running, token=ARM):
            pass
        assert refused.value.response.status_code == 503 and b'3 connections of arm are open' in refused.value.response.body
        with robot(running, token=BASE):
            pass


def test_a_flood_is_read_no_faster_than_its_account_may_send_however_many_connections_it_comes_over(running):
    with contextlib.ExitStack() as stack:
        # What they say last is not read soon: they do not wait for it.
        flooding = [stack.enter_context(robot(running, token=BASE, close_timeout=0.2)) for _ in range(4)]
        before = running.gateway._refusals['rate']
        for connection in flooding:
            for _ in range(50):
                say(connection, session_id='flood', **{'observation/image': SMALL})  # all fit into the buffers on the way
        time.sleep(2.0)
        assert running.gateway._refusals['rate'] - before < 4 + 2.0 * 2.0 + 4, 'each of the connections once, then two a second'
        with robot(running, token=ARM) as connection:
            assert infer(connection, session_id='a')['valid_steps']


def test_connections_of_an_account_that_sent_too_much_wait_for_their_turn_and_for_none_that_has_left(tmp_path):
    accounts = Accounts((Account('arm', digest(ARM), megabytes=2.0, messages=0.0, openings=0.0),))
    with gateway(tmp_path, FakeService(sessions=8), accounts=accounts) as running, contextlib.ExitStack() as stack:
        *leaving, one, two = (stack.enter_context(robot(running, token=ARM)) for _ in range(6))
        assert infer(two, session_id='two', **{'observation/image': np.zeros((1400, 1400, 3), np.uint8)})['valid_steps']
        begun = time.monotonic()
        for connection in (*leaving, one, two):
            assert 'refused: rate' in infer(connection)  # the account lacks two megabytes, and each of them one more
        for connection in leaving:
            connection.close()
        for connection in (one, two):
            say(connection, session_id='one' if connection is one else 'two')
        assert heard(one)['valid_steps'] and heard(two)['valid_steps']
        assert 1.0 < time.monotonic() - begun < 5.0, 'the wait of 1.5 s was served once, not six times'


def test_pages_of_other_origins_are_refused(running):
    assert status_of(running, token=ARM, origin='https://evil.example') == 403
    with client(running, token=ARM, origin='https://cell.example') as connection:
        assert connection.recv(TIMEOUT)


def test_an_account_that_is_taken_away_loses_its_connections(running):
    try:
        with robot(running, token=ARM) as connection, robot(running, token=BASE) as other:
            rest = Accounts((Account('base', digest(BASE), messages=2.0, openings=0.5),))
            running.call(running.gateway.replace_accounts, rest)
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(TIMEOUT)
            assert closed.value.rcvd.code == 1008 and other.ping().wait(TIMEOUT)
        assert status_of(running, token=ARM) == 401
    finally:
        running.call(running.gateway.replace_accounts, ACCOUNTS)


def test_an_account_that_is_taken_away_while_it_connects_is_not_let_in(running, monkeypatch):
    asked, answer = threading.Event(), threading.Event()

    async def about():
        asked.set()
        await asyncio.to_thread(answer.wait, TIMEOUT)
        return await known()
    known = running.gateway.about
    monkeypatch.setattr(running.gateway, 'about', about)
    try:
        with ThreadPoolExecutor(1) as connecting:
            connection = connecting.submit(connect, running.url(), additional_headers={'Authorization': f'Bearer {ARM}'},
                                           open_timeout=TIMEOUT)
            assert asked.wait(TIMEOUT)
            running.call(running.gateway.replace_accounts, Accounts((Account('base', digest(BASE)),)))
            answer.set()
            with connection.result(TIMEOUT) as connected, pytest.raises(ConnectionClosed) as closed:
                connected.recv(TIMEOUT)
        assert closed.value.rcvd.code == 1008
    finally:
        answer.set()
        running.call(running.gateway.replace_accounts, ACCOUNTS)


def test_limits_that_are_changed_apply_from_then_on(running):
    def account(**limits):
        return Account('arm', digest(ARM), **limits)
    try:
        for limits, refused in ({'messages': 0.1}, 'sends too much'), ({'openings': 0.1}, 'opens sessions too often'), ({}, ''):
            running.call(running.gateway.replace_accounts, Accounts((account(**limits),)))
            with robot(running, token=ARM) as connection:
                replies = [infer(connection, session_id=f'{"".join(limits)}{k}') for k in range(2)]
            assert refused in replies[1] if refused else replies[1]['valid_steps']
    finally:
        running.call(running.gateway.replace_accounts, ACCOUNTS)


def test_a_message_of_more_megabytes_than_its_account_may_send_in_a_burst_is_taken_and_waited_for(running):
    account = Account('camera', digest(new_token()), megabytes=1.0)  # two in a burst
    wait = running.gateway.wait
    assert wait(account, 6) == 0.0
    assert wait(account, 1) == pytest.approx(5.0, abs=1.0)


def test_the_audit_log_names_who_did_what_and_no_token(running, audit_file):
    with robot(running, token=ARM) as connection:
        infer(connection, session_id='audited')
    status_of(running, token='guessed')
    lines = wait_for(lambda: [each for each in map(json.loads, audit_file.read_text().splitlines())
                              if each['event'] == 'unauthorized'] and audit_file.read_text())
    events = [json.loads(line) for line in lines.splitlines()]
    assert {'connected', 'session_begins', 'disconnected', 'unauthorized'} <= {each['event'] for each in events}
    assert any(each.get('session') == 'audited' and each['account'] == 'arm' for each in events)
    assert not any(secret in lines for secret in (ARM, BASE, CERTIFIED, 'guessed', 'red ball'))
    assert os.stat(audit_file).st_mode & 0o077 == 0


def test_an_audit_log_on_a_full_disk_is_told_once_and_goes_on_when_there_is_room(tmp_path, monkeypatch, caplog):
    caplog.set_level('INFO', 'worldmodel_ros')
    room = iter([3, None, None, 10_000, 10_000, 10_000])  # bytes that each write finds room for; None: it fails
    written = os.write

    def write(descriptor, data):
        size = next(room) if descriptor == log._file._descriptor else len(data)
        if size is None:
            raise OSError(28, 'No space left on device')
        return written(descriptor, data[:size])
    log = AuditLog(tmp_path / 'audit')
    monkeypatch.setattr('worldmodel_ros.serving.gateway.security.os.write', write)
    for number in range(5):
        log('connected', number=number)
    log.close()
    torn, *lines = (tmp_path / 'audit').read_text().splitlines()
    assert torn == '{"t' and [json.loads(line)['number'] for line in lines] == [3, 4]
    told = [record.getMessage() for record in caplog.records if 'audit' in record.getMessage()]
    assert [each.partition(str(tmp_path / 'audit'))[2] for each in told] == [
        ' cannot be written: No space left on device', ' is written again: 3 lines are lost']


def test_connections_that_come_too_fast_are_dropped_before_a_byte_is_read(tmp_path):
    with gateway(tmp_path, connects=2.0) as running:
        with robot(running) as connection:
            dropped = 0
            for _ in range(20):
                try:
                    with contextlib.closing(socket.create_connection(('127.0.0.1', running.port), TIMEOUT)) as knocking:
                        knocking.sendall(b'GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n')
                        dropped += knocking.recv(100) == b''
                except ConnectionError:
                    dropped += 1
            assert dropped >= 10 and wait_for(lambda: running.listening.refused == dropped)
            assert infer(connection)['valid_steps'] == 4


@pytest.mark.parametrize('one, other, same', [
    ('203.0.113.5', '203.0.113.6', False), ('::ffff:203.0.113.5', '::ffff:198.51.100.7', False),
    ('::ffff:203.0.113.5', '203.0.113.5', True), ('2001:db8::1', '2001:db8::2:1', True),
    ('2001:db8::1', '2001:db8:0:1::1', False), ('fe80::1%eth0', 'fe80::2%eth0', True)])
def test_connections_are_limited_by_ipv4_address_on_any_socket_and_by_ipv6_network(one, other, same):
    assert (security._neighbourhood(one) == security._neighbourhood(other)) is same


# --- TLS ---


@pytest.fixture(scope='module')
def authority():
    return trustme.CA()


def write(issued, folder, name):
    certificate, key = folder / f'{name}.pem', folder / f'{name}.key'
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    return certificate, key


def trusting(authority, *pair):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if pair:
        context.load_cert_chain(*pair)
    return context


def test_a_connection_over_which_nothing_comes_or_nothing_goes_out_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(server, '_SEND', 1.0)
    still = {'poses': np.tile(mounted(), (64, 1, 1)), 'intrinsics': INTRINSICS}
    with gateway(tmp_path, FakeService(sessions=4), limits=Limits(idle=2.0)) as running:
        begun = time.monotonic()
        with client(running, ping_interval=None) as silent:
            heard(silent)
            with pytest.raises(ConnectionClosed):
                silent.recv(TIMEOUT)
        assert time.monotonic() - begun > 2.0
        # It asks for much and reads nothing: ten times 64 frames as float32 are 31 MB, more than the buffers on the way hold.
        with client(running, PATH, ping_interval=None, max_queue=1) as greedy:
            greedy.recv(TIMEOUT)
            for image in ({'image': np.zeros((64, 64, 3), np.uint8)}, *[{}] * 9):
                greedy.send(encode({'prompt': '', 'camera': still, **image}))
            wait_for(lambda: 'worldmodel_gateway_connections 0' in get(running, '/metrics')[2], TIMEOUT)
        with robot(running) as connection:
            assert 'actions' in infer(connection)


def test_tls_is_of_version_1_3_and_a_stranger_certificate_is_refused_by_clients(tmp_path, authority):
    tls = server_context(*write(authority.issue_cert('127.0.0.1'), tmp_path, 'host'), None)
    with gateway(tmp_path, tls=tls, accounts=ACCOUNTS) as running:
        context = trusting(authority)
        with robot(running, token=ARM, ssl=context) as connection:
            assert connection.socket.version() == 'TLSv1.3' and infer(connection)['valid_steps'] == 4
            assert not connection.socket.session.has_ticket  # which would come while the client sends its request
        assert get(running, '/healthz', context=context)[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError), client(running, token=ARM, ssl=ssl.create_default_context()):
            pass
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)), client(running, token=ARM, ssl=context):
            pass
        # A renewed certificate is what the next client sees.
        tls.load_cert_chain(*write(authority.issue_cert('127.0.0.1', common_name='renewed'), tmp_path, 'renewed'))
        with robot(running, token=ARM, ssl=trusting(authority)) as connection:
            assert 'renewed' in str(connection.socket.getpeercert()['subject'])


def test_a_client_certificate_is_a_robot(tmp_path, authority):
    clients = trustme.CA()
    clients.cert_pem.write_to_path(tmp_path / 'clients.pem')
    tls = server_context(*write(authority.issue_cert('127.0.0.1'), tmp_path, 'host'), tmp_path / 'clients.pem')
    pairs = {name: write(clients.issue_cert('robot@cell', common_name=name), tmp_path, name) for name in ('cell 7', 'cell 8')}
    with gateway(tmp_path, tls=tls, accounts=ACCOUNTS) as running:
        with robot(running, ssl=trusting(authority, *pairs['cell 8'])) as connection:
            assert infer(connection)['valid_steps'] == 4
        assert status_of(running, ssl=trusting(authority, *pairs['cell 7'])) == 401  # this one needs its token, too
        with robot(running, token=CERTIFIED, ssl=trusting(authority, *pairs['cell 7'])) as connection:
            assert infer(connection)['valid_steps'] == 4
        for context in (trusting(authority), trusting(authority, *write(authority.issue_cert('x'), tmp_path, 'other'))):
            with pytest.raises((ssl.SSLError, ConnectionError, EOFError, ConnectionClosed, Exception)) as refused:
                with client(running, token=ARM, ssl=context) as connection:
                    heard(connection)
            assert not isinstance(refused.value, InvalidStatus)


# --- what is refused before anything listens ---


@pytest.mark.parametrize('changes, reason', [
    ({'host': '0.0.0.0'}, 'without TLS'), ({'host': '0.0.0.0', 'plaintext': True}, 'give --accounts'),
    ({'host': '0.0.0.0', 'certificate': 'c', 'key': 'k'}, 'give --accounts'), ({'host': ''}, 'without TLS'),
    ({'certificate': 'c'}, 'needs both'), ({'client_ca': 'c'}, 'needs them'), ({'store': 's'}, 'give --client-ca'),
    ({'port': 70000}, 'port is'),
    ({'message_mb': 0}, 'message_mb is'), ({'linger': -1}, 'linger is'), ({'linger': 601}, 'up to 600 s'),
    ({'idle': float('nan')}, 'idle is')])
def test_options_that_are_not_safe_or_make_no_sense_are_refused(changes, reason):
    with pytest.raises(GatewayError, match=reason):
        Options(**changes)


def test_this_machine_alone_needs_neither_tokens_nor_tls():
    Options()
    Options(host='0.0.0.0', accounts='a', plaintext=True)
    assert is_loopback('::1') and is_loopback('localhost') and not is_loopback('0.0.0.0') and not is_loopback('::')


@pytest.mark.parametrize('text, reason', [
    ('', 'no file of accounts'), ('accounts: 3', 'no file of accounts'), ('accounts: [{sha256: x}]', 'has a name'),
    ('accounts: [{name: a, token: b}]', 'has a name'), ('accounts: [{name: a}]', 'neither sha256 nor certificate'),
    ('accounts: [{name: a, sha256: abc}]', '64 hexadecimal digits'), ('accounts: [{name: "a b", certificate: c}]', 'no name'),
    ('accounts: [{name: a, certificate: c}, {name: a, certificate: d}]', 'the same name'),
    ('accounts: [{name: a, certificate: c, messages: -1}]', 'messages is -1'),
    ('accounts: [{name: a, certificate: c, sessions: 1.5}]', 'whole number')])
def test_a_file_of_accounts_that_makes_no_sense_is_refused(tmp_path, text, reason):
    file = tmp_path / 'accounts.yaml'
    file.write_text(text)
    with pytest.raises(AccountError, match=reason):
        Accounts.read(file)


def test_every_account_is_compared_whether_the_token_is_known_or_not(monkeypatch):
    calls = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, 'compare_digest', lambda *pair: calls.append(pair) or compare(*pair))
    accounts = Accounts(tuple(Account(f'a{k}', digest(str(k))) for k in range(5)))
    for token, name in (('0', 'a0'), ('4', 'a4'), ('x', None)):
        calls.clear()
        found = accounts.find(f'Bearer {token}', '')
        assert (found and found.name) == name and len(calls) == 5
