"""Defences against another user of the same machine: docs/threats.md, On the same machine."""

from __future__ import annotations

from mutation import HTTP, SERVER, Mutation

PRIVATE = "p2pcast/store/private.py"
SHADOW = "p2pcast/state/shadow.py"
LEFTOVERS = "p2pcast/state/leftovers.py"
FOLDERS = "tests/p2pcast/store/test_private.py::"
LEFT = "tests/p2pcast/state/test_leftovers.py::"
USER = "tests/daemons/test_another_user.py::"
BEARERS = "tests/p2pcast/cli/test_bearers.py::"

MADE_FIRST = "makes the folder of a state or a shadow before p2pcast does"
LINKED = "puts links to other files at names that p2pcast opens"
RENAMES = "renames a folder of p2pcast's and puts another in its place"
READS = "reads state, anchors, keys, the shadow or patches"
OPENED = "reads what version 0.1 left open"
INSTALLS = "puts other weights where engines read checkpoints"
COMMANDS = "commands a daemon over loopback"
SQUATS = "takes the port of a daemon that died, to be told its bearer"
SOCKETS = "asks at the install socket, or passes for it"
REBINDS = "leads a name of a web page to loopback"
FILLS = "nobody in particular: shadows of state folders that are gone fill the memory"

LOCAL = [
    Mutation(
        MADE_FIRST,
        PRIVATE,
        '    if found.st_uid != os.geteuid():\n        raise LocalError(\n            f"{path} belongs',
        '    if False:\n        raise LocalError(\n            f"{path} belongs',
        FOLDERS + "test_a_folder_that_another_user_made_first_is_refused",
    ),
    Mutation(
        MADE_FIRST,
        PRIVATE,
        '    if found.st_mode & stat.S_IWOTH:\n        raise LocalError(\n            f"all users of this machine may write to {path}; look',
        '    if False:\n        raise LocalError(\n            f"all users of this machine may write to {path}; look',
        FOLDERS + "test_a_folder_that_all_may_write_to_is_refused",
    ),
    Mutation(
        MADE_FIRST,
        PRIVATE,
        "    if names and marks is not None and not set(names) & set(marks):",
        "    if False:",
        FOLDERS + "test_a_folder_of_other_things_is_not_closed_to_others",
    ),
    Mutation(
        LINKED,
        PRIVATE,
        "        if path.is_symlink():\n            raise _link(path)\n        if make:",
        "        path = path.resolve()\n        if make:",
        FOLDERS + "test_a_link_in_a_folders_place_is_refused",
    ),
    Mutation(
        LINKED,
        PRIVATE,
        "        if path.is_symlink():\n            raise _link(path)\n        if make:",
        "        path = path.resolve()\n        if make:",
        FOLDERS + "test_a_link_in_place_of_the_folder_of_patches_costs_its_target_nothing",
    ),
    Mutation(
        LINKED,
        "p2pcast/store/disk.py",
        "    safe = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC",
        "    safe = os.O_CREAT | os.O_CLOEXEC",
        FOLDERS + "test_a_link_at_a_name_that_is_opened_costs_its_target_nothing",
    ),
    Mutation(
        LINKED,
        "p2pcast/state/patch_file.py",
        "                private.check_file(self._fd, self._part)\n",
        "",
        FOLDERS + "test_a_link_at_a_name_that_is_opened_costs_its_target_nothing",
    ),
    Mutation(
        LINKED,
        SHADOW,
        "            private.check_file(fd, path)\n",
        "",
        FOLDERS + "test_a_link_at_a_name_that_is_opened_costs_its_target_nothing",
    ),
    Mutation(
        LINKED,
        PRIVATE,
        "flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)",
        "flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)",
        FOLDERS + "test_a_shadow_is_not_opened_through_a_link",
    ),
    Mutation(
        LINKED,
        "p2pcast/state/patch_file.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_RDONLY | os.O_CLOEXEC",
        FOLDERS + "test_a_patch_is_not_read_through_a_link",
    ),
    Mutation(
        RENAMES,
        "p2pcast/store/private.py",
        "    _check_links(path.parent.absolute())\n",
        "",
        "tests/p2pcast/store/test_private.py::test_a_folder_behind_another_users_link_is_refused",
    ),
    Mutation(
        RENAMES,
        PRIVATE,
        "        if found.st_mode & stat.S_IWOTH and not (",
        "        if False and not (",
        FOLDERS + "test_a_folder_that_others_may_rename_is_refused",
    ),
    Mutation(
        READS,
        "p2pcast/store/disk.py",
        "PRIVATE = Modes(0o600, 0o700)",
        "PRIVATE = Modes(0o644, 0o755)",
        FOLDERS + "test_what_is_written_is_its_users_alone_unless_a_user_asked_for_it",
    ),
    Mutation(
        READS,
        PRIVATE,
        "    os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~OTHERS)\n",
        "",
        FOLDERS + "test_a_folder_of_version_0_1_is_tightened",
    ),
    Mutation(
        READS,
        "p2pcast/store/disk.py",
        "PRIVATE = Modes(0o600, 0o700)",
        "PRIVATE = Modes(0o644, 0o755)",
        USER + "test_another_user_reads_nothing",
    ),
    Mutation(
        READS,
        "p2pcast/daemon.py",
        "    os.umask(private.UMASK | _users_umask)",
        "    os.umask(_users_umask)",
        FOLDERS + "test_a_daemon_keeps_to_itself_what_it_makes",
    ),
    Mutation(
        OPENED,
        PRIVATE,
        "        os.chmod(name, stat.S_IMODE(found.st_mode) & ~OTHERS, dir_fd=folder)",
        "        pass",
        FOLDERS + "test_a_folder_of_version_0_1_is_tightened",
    ),
    Mutation(
        OPENED,
        PRIVATE,
        '    if found.st_uid != os.geteuid():\n        raise LocalError(f"{path} belongs to user {found.st_uid}, who could change',
        '    if False:\n        raise LocalError(f"{path} belongs to user {found.st_uid}, who could change',
        FOLDERS + "test_what_another_user_put_into_an_open_folder_is_named",
    ),
    Mutation(
        INSTALLS,
        PRIVATE,
        '    if found.st_mode & stat.S_IWOTH:\n        raise LocalError(\n            f"all users of this machine may write to {path}, and',
        '    if False:\n        raise LocalError(\n            f"all users of this machine may write to {path}, and',
        FOLDERS + "test_a_shared_folder_that_all_may_write_to_is_refused",
    ),
    Mutation(
        INSTALLS,
        PRIVATE,
        "    if found.st_uid not in _trusted():",
        "    if False:",
        FOLDERS + "test_a_shared_folder_of_another_user_is_refused",
    ),
    Mutation(
        INSTALLS,
        "rollout_node/installers/step_folders.py",
        "            self._mode = private.check_shared(self.folder)",
        "            self._mode = 0o755",
        "tests/rollout_node/test_installers.py::test_who_may_read_what_is_installed_is_what_its_folder_says",
    ),
    Mutation(
        COMMANDS,
        SERVER,
        "            if request.method not in READING:",
        "            if False:",
        HTTP + "test_a_command_needs_the_bearer_on_loopback_too",
    ),
    Mutation(
        COMMANDS,
        SERVER,
        "            if request.method not in READING:",
        "            if False:",
        USER + "test_another_user_changes_nothing_over_http",
    ),
    Mutation(
        COMMANDS,
        "trainer_node/hub.py",
        "            bearer_file=state.resolve() / bearer.FILE,\n",
        "",
        USER + "test_another_user_changes_nothing_over_http",
    ),
    Mutation(
        SQUATS,
        "p2pcast/cli/status.py",
        "            if (other := foreign_listener(url, owner)) is not None:",
        "            if (other := None) is not None:",
        USER + "test_the_bearer_is_not_told_to_another_user_at_a_dead_daemons_port",
    ),
    Mutation(
        SOCKETS,
        "rollout_node/install_socket.py",
        "            if other_user(sock) is not None:",
        "            if False:",
        USER + "test_another_user_gets_nothing_from_the_install_socket",
    ),
    Mutation(
        SOCKETS,
        "rollout_node/install_frames.py",
        "                if (user := other_user(sock)) is not None:",
        "                if (user := None) is not None:",
        USER + "test_a_worker_takes_no_weights_from_another_users_socket",
    ),
    Mutation(
        REBINDS,
        SERVER,
        "    if (match := _HOST.fullmatch(host)) is None:",
        "    if (match := _HOST.match(host)) is None:",
        HTTP + "test_a_name_that_was_led_to_loopback_reads_nothing",
    ),
    Mutation(
        FILLS,
        LEFTOVERS,
        "            if left.proved and remove(left):",
        "            if False:",
        LEFT + "test_the_shadow_of_a_state_folder_that_is_gone_is_removed",
    ),
    Mutation(
        FILLS,
        LEFTOVERS,
        "    if os.path.lexists(home) or above.stat().st_dev != device:",
        "    if os.path.lexists(home):",
        LEFT + "test_a_state_folder_that_may_be_elsewhere_keeps_its_shadow",
    ),
    Mutation(
        FILLS,
        LEFTOVERS,
        "        found = _judged(left.folder)  # as it is now that nobody else can claim it\n        if found is None or not found[0]:\n",
        "        if False:\n",
        LEFT + "test_what_was_claimed_since_it_was_found_stays",
    ),
    Mutation(
        FILLS,
        SHADOW,
        "            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "            pass",
        LEFT + "test_what_a_process_has_locked_stays",
    ),
    Mutation(
        FILLS,
        SHADOW,
        "        if is_at(folder, fd):",
        "        if True:",
        LEFT + "test_a_folder_that_is_removed_while_it_is_being_locked_is_made_anew",
    ),
    Mutation(
        FILLS,
        "trainer_node/hub.py",
        "        await asyncio.to_thread(sweep)\n",
        "",
        "tests/daemons/test_leftover_shadows.py::test_a_start_removes_shadows_that_nobody_will_open_again",
    ),
    Mutation(
        FILLS,
        "rollout_node/peer.py",
        "        await asyncio.to_thread(sweep)\n",
        "",
        "tests/daemons/test_leftover_shadows.py::test_a_start_removes_shadows_that_nobody_will_open_again",
    ),
]
