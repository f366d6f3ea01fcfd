from __future__ import annotations

from recorder import Background, blocking

from rollout_node.control.bearer_file import BearerFile


async def test_the_file_is_private_and_holds_the_token(tmp_path):
    made = BearerFile("first", tmp_path, blocking, Background())
    made.write()
    (path,) = tmp_path.iterdir()
    assert path.read_text() == "first\n"
    assert path.stat().st_mode & 0o777 == 0o600


async def test_before_the_server_exists_a_new_token_is_only_remembered(tmp_path):
    background = Background()
    made = BearerFile("first", tmp_path, blocking, background)
    made.replace("second")
    assert made.token == "second"
    assert background.work == []
    assert list(tmp_path.iterdir()) == []


async def test_a_new_token_goes_to_the_server_and_into_the_file(tmp_path):
    background, accepted = Background(), []
    made = BearerFile("first", tmp_path, blocking, background)
    made.write()
    made.serve(accepted.append)
    made.replace("first")
    assert accepted == []
    made.replace("second")
    assert accepted == ["second"]
    assert await background.run() == ["bearer"]
    assert next(tmp_path.iterdir()).read_text() == "second\n"
