"""Reading bags: whole ones in every form that recorders write, and damaged ones as far as they go."""
import shutil
import sqlite3
import tracemalloc
from types import SimpleNamespace

import pytest
import yaml
from bag_messages import TYPES, string
from bags import NS, START, bag_file, corrupt, shift_time, simulated_drive, truncate, write_bag
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcap_forms import FORMS, write_mcap
from rosbags.rosbag2 import StoragePlugin, Writer

from worldmodel_ros.bags.mcap_records import read_records
from worldmodel_ros.bags.problems import BagError, MessageError
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.bags.storage import _Position
from worldmodel_ros.nodes.recorder.bag import BagWriter, TopicDescription
from worldmodel_ros.sim.scene import COLOURS

STORAGES = ('mcap', 'sqlite3')


def records(path):
    """All messages of a bag as (topic, bytes, time of receipt), and the kinds of its problems."""
    with open_bag(path) as bag:
        found = [(topic.name, bytes(raw), log) for topic, raw, log in bag.messages()]
        return found, [problem.kind for problem in bag.problems]


@pytest.fixture(scope='module')
def drive():
    return simulated_drive(seconds=3.0)


@pytest.fixture(scope='module')
def whole(drive, tmp_path_factory):
    return write_bag(tmp_path_factory.mktemp('whole') / 'drive', drive)


def test_messages_come_in_the_order_of_their_receipt_with_their_topics(whole, drive):
    with open_bag(whole) as bag:
        found = list(bag.messages())
        assert [r.log_ns for r in found] == sorted([*drive.received, *(t for t, _ in [*drive.commands, *drive.goals])])
        assert {name: (topic.type, topic.count) for name, topic in bag.topics.items()} == {
            '/camera/image_raw/compressed': ('sensor_msgs/msg/CompressedImage', 30),
            '/cmd_vel': ('geometry_msgs/msg/TwistStamped', 30), '/goal': ('std_msgs/msg/String', 1)}
        assert (bag.start_ns, bag.end_ns) == (START, drive.commands[-1][0])
        topic, raw, log = next(bag.messages(['/cmd_vel']))
        twist = bag.deserialize(topic, raw).twist
        assert (log, (twist.linear.x, twist.angular.z)) == drive.commands[0]
        assert not bag.problems


@pytest.mark.parametrize(('storage', 'compression'), [
    ('sqlite3', 'none'), ('sqlite3', 'message'), ('sqlite3', 'file'), ('mcap', 'storage'), ('mcap', 'message'),
    ('mcap', 'file')])
def test_every_storage_and_compression_holds_the_same_messages(whole, drive, tmp_path, storage, compression):
    bag = write_bag(tmp_path / 'bag', drive, storage=storage, compression=compression)
    assert records(bag) == records(whole)
    assert records(bag_file(bag)) == records(whole)  # the file alone, without its metadata.yaml


@pytest.mark.parametrize('name', ['run#3', '50%', 'p%41', 'left?'])
@pytest.mark.parametrize('shorter_by', [0, 5000])
def test_any_name_of_a_folder_will_do_for_sqlite(drive, tmp_path, name, shorter_by):
    bag = write_bag(tmp_path / 'plain', drive, storage='sqlite3').rename(tmp_path / name)
    if shorter_by:
        with bag_file(bag).open('r+b') as stream:
            stream.truncate(bag_file(bag).stat().st_size - shorter_by)
    with open_bag(bag) as opened:
        assert len(list(opened.messages())) > 40
        assert [problem.kind for problem in opened.problems] == (['damaged'] if shorter_by else [])
        assert opened.topics['/goal'].definition.data


@pytest.mark.parametrize('form', FORMS)
def test_every_form_of_mcap_is_read(whole, tmp_path, form):
    found, problems = records(write_mcap(tmp_path / 'drive.mcap', whole, form))
    assert found == records(whole)[0]
    assert ('no index' in problems) == (form.startswith('no index'))


@pytest.mark.parametrize('listed', [True, False])
def test_a_split_bag_is_read_in_the_order_of_its_parts(whole, tmp_path, listed):
    later = write_bag(tmp_path / 'later', shift_time(simulated_drive(seconds=1.0), 0.0, 2.2), image_topic='/other')
    shutil.copy(bag_file(whole), tmp_path / 'drive_2.mcap')
    shutil.copy(bag_file(later), tmp_path / 'drive_10.mcap')
    shutil.rmtree(later)
    if listed:
        information = {'relative_file_paths': ['drive_2.mcap', 'drive_10.mcap'], 'message_count': 61 + 21}
        (tmp_path / 'metadata.yaml').write_text(yaml.dump({'rosbag2_bagfile_information': information}))
    with open_bag(tmp_path) as bag:
        found = list(bag.messages())
        assert len(found) == 61 + 21
        assert [r.log_ns for r in found] == sorted(r.log_ns for r in found)
        assert bag.topics['/cmd_vel'].count == 40
        assert [p.kind for p in bag.problems] == ([] if listed else ['no metadata'])


@pytest.mark.parametrize('storage', STORAGES)
@pytest.mark.parametrize('back', [0, 5])  # s; where time was set back, the file is read without its index
def test_types_that_only_the_bag_defines_are_read(tmp_path, storage, back):
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore
    store = get_typestore(Stores.ROS2_JAZZY)
    store.register(get_types_from_msg('float32 speed\nstd_msgs/Header header\n', 'my_robot/msg/Wheel'))
    with Writer(tmp_path / 'bag', version=9, storage_plugin=StoragePlugin[storage.upper()]) as writer:
        connection = writer.add_connection('/wheel', 'my_robot/msg/Wheel', typestore=store)
        time = store.types['builtin_interfaces/msg/Time'](sec=3, nanosec=0)
        header = store.types['std_msgs/msg/Header'](stamp=time, frame_id='wheel')
        message = store.types['my_robot/msg/Wheel'](speed=0.5, header=header)
        for at in (START, START - back * NS):
            writer.write(connection, at, store.serialize_cdr(message, 'my_robot/msg/Wheel'))
    with open_bag(tmp_path / 'bag') as bag:
        assert [problem.kind for problem in bag.problems] == ['time set back'] * bool(back)
        topic, raw, _ = next(bag.messages())
        assert (bag.deserialize(topic, raw).speed, bag.deserialize(topic, raw).header.frame_id) == (0.5, 'wheel')


def test_a_bag_without_definitions_is_read_by_those_of_jazzy(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, storage='sqlite3')
    with sqlite3.connect(bag_file(bag)) as database:  # as rosbag2 of Humble wrote it
        database.execute('UPDATE schema SET schema_version = 3')
        database.execute('DROP TABLE message_definitions')
    with open_bag(bag) as bag:
        topic, raw, _ = next(bag.messages(['/goal']))
        assert bag.deserialize(topic, raw).data in COLOURS


def test_bytes_that_are_no_message_are_refused_by_name(whole):
    with open_bag(whole) as bag:
        with pytest.raises(MessageError, match='/cmd_vel: 5 bytes are no geometry_msgs/msg/TwistStamped'):
            bag.deserialize(bag.topics['/cmd_vel'], b'\0\1\0\0x')


def test_of_two_types_under_one_name_the_more_frequent_is_read(tmp_path):
    with Writer(tmp_path / 'bag', version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        often = writer.add_connection('/goal', 'std_msgs/msg/String', typestore=TYPES)
        seldom = writer.add_connection('/goal', 'std_msgs/msg/Bool', typestore=TYPES)
        flag = TYPES.types['std_msgs/msg/Bool'](data=True)
        writer.write(seldom, START, TYPES.serialize_cdr(flag, 'std_msgs/msg/Bool'))
        for k in range(2):
            writer.write(often, START + k, TYPES.serialize_cdr(string('red'), 'std_msgs/msg/String'))
    with open_bag(tmp_path / 'bag') as bag:
        assert [bag.deserialize(r.topic, r.raw).data for r in bag.messages()] == ['red', 'red']
        assert [p.kind for p in bag.problems] == ['topic']


@pytest.mark.parametrize('storage', STORAGES)
def test_recorded_qos_is_kept(tmp_path, storage):
    from rosbags.interfaces import Qos, QosDurability, QosHistory, QosLiveliness, QosReliability, QosTime
    forever = QosTime(2147483647, 4294967295)
    qos = Qos(QosHistory.KEEP_LAST, 3, QosReliability.BEST_EFFORT, QosDurability.VOLATILE, forever, forever,
              QosLiveliness.AUTOMATIC, forever, False)
    with Writer(tmp_path / 'bag', version=9, storage_plugin=StoragePlugin[storage.upper()]) as writer:
        goal = writer.add_connection('/goal', 'std_msgs/msg/String', typestore=TYPES, offered_qos_profiles=[qos])
        writer.write(goal, START, TYPES.serialize_cdr(string('red'), 'std_msgs/msg/String'))
    with open_bag(tmp_path / 'bag') as bag:
        assert bag.topics['/goal'].qos == (qos,)
    truncate(tmp_path / 'bag', 0.9)
    with open_bag(tmp_path / 'bag') as bag:
        assert bag.topics['/goal'].qos == (qos,)


@pytest.mark.parametrize('share', [0.3, 0.6, 0.95])
@pytest.mark.parametrize('form', FORMS)
def test_of_a_file_that_is_cut_off_everything_before_is_read(whole, tmp_path, form, share):
    file = write_mcap(tmp_path / 'drive.mcap', whole, form)
    complete = records(whole)[0]
    with file.open('r+b') as stream:
        stream.truncate(round(file.stat().st_size * share))
    found, problems = records(file)
    assert found == complete[:len(found)]
    # At the end of a file are its indexes.
    assert len(found) > (share - 0.25) * len(complete)
    assert problems == ['truncated']


@pytest.mark.parametrize('share', [0.5, 0.9])
def test_of_a_sqlite_file_that_is_cut_off_the_rest_is_read(drive, tmp_path, share):
    bag = write_bag(tmp_path / 'bag', drive, storage='sqlite3')
    complete = records(bag)[0]
    truncate(bag, share)
    found, problems = records(bag)
    assert [log for *_, log in found] == sorted(log for *_, log in found)
    assert len(set(found) - set(complete)) <= 1  # SQLite fills the page where the file ends with zeros
    assert len(found) > (share - 0.3) * len(complete)
    assert problems == ['no metadata', 'damaged']


@pytest.mark.parametrize('form', ['zstd chunks', 'lz4 chunks', 'no index'])
def test_a_damaged_chunk_costs_its_own_messages_only(whole, tmp_path, form):
    file = write_mcap(tmp_path / 'drive.mcap', whole, form)
    complete = records(file)[0]
    with file.open('r+b') as stream:
        stream.seek(round(file.stat().st_size * 0.5))
        stream.write(b'\xaa' * 64)
    found, problems = records(file)
    assert 'damaged' in problems
    assert set(found) < set(complete) and len(set(found)) == len(found)
    assert len(complete) // 2 < len(found)
    assert (found[0], found[-1]) == (complete[0], complete[-1])
    assert [log for *_, log in found] == sorted(log for *_, log in found)


def test_a_damaged_page_costs_its_own_messages_only(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, storage='sqlite3')
    complete = records(bag)[0]
    corrupt(bag, share=0.5, length=6000)
    found, problems = records(bag)
    assert problems == ['damaged']
    assert 0.7 * len(complete) < len(found)
    assert found[-1] == complete[-1]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from('ab')), max_size=12), st.integers(0, 12))
def test_another_reader_goes_on_where_the_first_one_ended(stamps, read):
    messages = [(SimpleNamespace(topic=topic), time, bytes([number]))
                for number, (time, topic) in enumerate(sorted(stamps, key=lambda stamp: stamp[0]))]
    position = _Position()
    for message in messages[:read]:
        position.passed(message)
    assert list(position.skip_passed(iter(messages))) == messages[read:]


@pytest.mark.parametrize('storage', STORAGES)
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_does_more_than_be_reported(drive, tmp_path, storage, data):
    whole = tmp_path / f'{storage}'
    if not whole.exists():
        compression = 'storage' if storage == 'mcap' else 'none'
        write_bag(whole, simulated_drive(seconds=1.0), storage=storage, compression=compression)
    broken = tmp_path / f'broken{bag_file(whole).suffix}'
    contents = bytearray(bag_file(whole).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(contents) - 1))
        damage = data.draw(st.binary(min_size=1, max_size=40))
        contents[at:at + len(damage)] = damage
    broken.write_bytes(contents[:data.draw(st.integers(0, len(contents)))])
    try:
        with open_bag(broken) as bag:
            for topic, raw, _ in bag.messages():
                try:
                    bag.deserialize(topic, raw)
                except MessageError as error:
                    assert str(error)
    except BagError as error:
        assert str(broken) in str(error)


def sqlite_bag(drive, tmp_path, *statements):
    """A bag in SQLite, after some statements; its file."""
    file = bag_file(write_bag(tmp_path / 'bag', drive, storage='sqlite3'))
    with sqlite3.connect(file) as database:
        for statement in statements:
            database.execute(statement)
    database.close()
    return file


@pytest.mark.parametrize('change', ["name = x'00ff'", "type = x'07'"])
def test_a_topic_that_has_no_words_for_a_name_or_type_costs_its_own_messages_only(drive, tmp_path, change):
    found, problems = records(sqlite_bag(drive, tmp_path, f"UPDATE topics SET {change} WHERE name = '/goal'"))
    assert {topic for topic, *_ in found} == {'/camera/image_raw/compressed', '/cmd_vel'}


@pytest.mark.parametrize('change', [
    "encoded_message_definition = '???'", "encoded_message_definition = CAST(x'ff' AS TEXT)", 'encoded_message_definition = 7',
    "encoding = 'unknown'"])
def test_in_a_damaged_file_definitions_that_are_damaged_too_are_replaced_by_those_of_jazzy(drive, tmp_path, change):
    file = sqlite_bag(shift_time(drive, 2.0, -5.0), tmp_path, f'UPDATE message_definitions SET {change}',
                      "UPDATE topics SET offered_qos_profiles = '['")
    with open_bag(file) as bag:
        topic, raw, _ = next(bag.messages(['/goal']))
        assert bag.deserialize(topic, raw).data in COLOURS and not topic.qos
        assert 'time set back' in [problem.kind for problem in bag.problems]


def test_a_file_that_turns_out_to_have_nothing_while_it_is_read_is_told_of(drive, tmp_path):
    # Opening it, rosbags counts rows; that no row has bytes shows only when they are read.
    found, problems = records(sqlite_bag(drive, tmp_path, "UPDATE messages SET data = 'words'"))
    assert not found and problems == ['unreadable file']


@pytest.mark.parametrize('storage', STORAGES)
@pytest.mark.parametrize('seconds', [-1.5, -30.0])
def test_what_was_recorded_while_time_was_set_back_is_read_in_the_order_of_recording(drive, tmp_path, storage, seconds):
    unset = write_bag(tmp_path / 'unset', drive, storage=storage)
    bag = write_bag(tmp_path / 'bag', shift_time(drive, 2.0, seconds), storage=storage)
    found, problems = records(bag)
    limit = drive.stamps[drive.index(2.0)]
    assert [(name, log) for name, _, log in found] == [
        (name, log + round(seconds * NS) * (log >= limit)) for name, _, log in records(unset)[0]]
    assert problems == ['time set back']


@pytest.mark.parametrize('reset', [5, 36, 40, 75])  # 36: between two files of 18 messages
def test_files_of_one_recording_are_read_one_after_the_other_where_time_was_set_back(tmp_path, reset):
    times = [START + (k if k < reset else k - reset - 20) * NS for k in range(100)]
    writer = BagWriter(tmp_path / 'bag', max_file_bytes=300_000)
    writer.add_topic(TopicDescription('/goal', 'std_msgs/msg/String', 'string data\n'))
    for number, time in enumerate(times):
        writer.write('/goal', time, TYPES.serialize_cdr(string(f'{number:03d}{"." * 30_000}'), 'std_msgs/msg/String'))
    writer.close()
    assert len(list((tmp_path / 'bag').glob('*.mcap'))) > 5
    with open_bag(tmp_path / 'bag') as bag:
        found = [(int(bag.deserialize(topic, raw).data[:3]), log) for topic, raw, log in bag.messages()]
        assert found == list(enumerate(times))
        assert [problem.kind for problem in bag.problems] == ['time set back']


def test_files_of_two_recorders_are_merged_by_time(whole, tmp_path):
    other = write_bag(tmp_path / 'other', simulated_drive(seconds=2.0), image_topic='/other', action_topic='/done',
                      goal_topic=None)
    both = tmp_path / 'both'
    both.mkdir()
    for bag in (whole, other):
        shutil.copy(bag_file(bag), both)
    found, problems = records(both)
    assert [log for *_, log in found] == sorted(log for *_, log in found)
    assert len(found) == len(records(whole)[0]) + len(records(other)[0]) and problems == ['no metadata']


def test_a_journal_that_was_not_written_back_is_told_of(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, storage='sqlite3')
    file = bag_file(bag)
    file.with_name(f'{file.name}-wal').write_bytes(b'x' * 100)
    with open_bag(bag) as opened:
        (problem,) = opened.problems
    assert problem.kind == 'unsaved journal' and 'wal_checkpoint' in problem.text


def metadata(bag, change):
    file = bag / 'metadata.yaml'
    contents = yaml.safe_load(file.read_text())
    change(contents['rosbag2_bagfile_information'])
    file.write_text(yaml.dump(contents))


@pytest.mark.parametrize(('spoil', 'kind', 'words'), [
    (lambda bag: (bag / 'metadata.yaml').unlink(), 'no metadata', 'ros2 bag reindex'),
    (lambda bag: (bag / 'metadata.yaml').write_text('{'), 'metadata', 'ros2 bag reindex'),
    (lambda bag: (bag / 'metadata.yaml').write_text('a: b'), 'metadata', 'KeyError'),
    (lambda bag: metadata(bag, lambda i: i['relative_file_paths'].append('x_1.mcap')), 'missing file', 'x_1.mcap'),
    (lambda bag: metadata(bag, lambda i: i.update(message_count=100)), 'missing messages', '100')])
def test_wrong_metadata_is_told_of_and_the_messages_are_read(whole, tmp_path, spoil, kind, words):
    bag = tmp_path / 'bag'
    shutil.copytree(whole, bag)
    spoil(bag)
    found, problems = records(bag)
    assert (len(found), problems) == (61, [kind])
    with open_bag(bag) as opened:
        assert words in opened.problems[0].text


def folder_with(tmp_path, name, contents):
    folder = tmp_path / 'bag'
    folder.mkdir()
    (folder / name).write_bytes(contents)
    return folder


@pytest.mark.parametrize(('make', 'words'), [
    (lambda p: p / 'nothing', ('does not exist', 'ros2 bag record')),
    (lambda p: folder_with(p, 'notes.txt', b'x'), ('no .mcap or .db3', 'notes.txt')),
    (lambda p: folder_with(p, 'a.bag', b'#ROSBAG V2.0\n') / 'a.bag', ('ROS 1', 'rosbags-convert')),
    (lambda p: folder_with(p, 'a.mp4', b'x') / 'a.mp4', ('neither .mcap nor .db3',)),
    (lambda p: folder_with(p, 'a.mcap', b''), ('a.mcap', 'record')),
    (lambda p: folder_with(p, 'a.mcap', b'nonsense' * 50), ('a.mcap', 'begin')),
    (lambda p: folder_with(p, 'a.db3', b'nonsense' * 50), ('a.db3', 'copy')),
    (lambda p: folder_with(p, 'a.mcap.zstd', b'nonsense' * 50), ('a.mcap.zstd', 'zstd'))])
def test_what_is_no_bag_is_refused_with_what_to_do(tmp_path, make, words):
    with pytest.raises(BagError) as refusal:
        open_bag(make(tmp_path))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_zeros_that_a_chunk_is_full_of_are_no_records():
    contents = read_records(bytes(9_000_000))
    assert contents == ([], [], False, False)


def test_memory_does_not_grow_with_the_bag(tmp_path):
    peaks = []
    for seconds in (2.0, 8.0):
        drive = simulated_drive(seconds=seconds, size=(180, 240), rate=20.0)
        path = write_bag(tmp_path / f'{seconds}', drive, encoding='rgb8')
        tracemalloc.start()
        with open_bag(path) as bag:
            size = sum(len(raw) for _, raw, _ in bag.messages())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert size > 20 * seconds * 180 * 240 * 3
    assert peaks[1] < 1.2 * peaks[0], peaks
