"""Defences against another user of the same machine: docs/design/security.md, On the same machine."""

from __future__ import annotations

from mutation import ACCESS, HTTP, Mutation

PRIVATE = "p2pcast/files/private_folders.py"
SHADOW = "p2pcast/state/shadow.py"
LEFTOVERS = "p2pcast/state/stale_shadows.py"
FOLDERS = "tests/p2pcast/files/test_private_folders.py::"
BACKUPS = "tests/trainer_node/backup/test_hub_backup.py::"
LEFT = "tests/p2pcast/state/test_stale_shadows.py::"
USER = "tests/daemons/trust/test_another_user.py::"

MADE_FIRST = "makes the folder of a state or a shadow before p2pcast does"
LINKED = "puts links to other files at names that p2pcast opens"
RENAMES = "renames a folder of p2pcast and puts another in its place"
READS = "reads state, anchors, keys, the shadow or patches"
OPENED = "another user reads state"
INSTALLS = "puts other weights where engines read checkpoints"
COMMANDS = "commands a daemon over loopback"
SQUATS = "takes the port of a daemon that died"
SOCKETS = "connects to the install socket"
REBINDS = "points a web page's host name at loopback"
FILLS = "shadows of removed state folders fill the memory"

PAGE = "tests/daemons/page/test_page_routes.py::"

LOCAL = [
    Mutation(
        "names files outside of the backup in its document",
        "trainer_node/backup/backup_folder.py",
        'if name.startswith("/") or ".." in parts or parts[0] not in (HUB, LEDGER):',
        "if False:",
        BACKUPS + "test_backup_that_names_files_elsewhere_is_refused",
    ),
    Mutation(
        "reads the run's keys in a backup",
        "trainer_node/backup/backup_folder.py",
        "disk.create(target, os.O_RDWR | (0 if grow else os.O_TRUNC))",
        "os.open(target, os.O_CREAT | os.O_RDWR, 0o644)",
        BACKUPS + "test_backup_is_private_and_restored_folders_are",
    ),
    Mutation(
        MADE_FIRST,
        PRIVATE,
        '    if found.st_uid != os.geteuid():\n        raise LocalError(\n            f"{path} belongs',
        '    if False:\n        raise LocalError(\n            f"{path} belongs',
        FOLDERS + "test_folder_created_by_another_user_is_refused",
    ),
    Mutation(
        MADE_FIRST,
        PRIVATE,
        "    if found.st_mode & stat.S_IWOTH:\n"
        "        raise LocalError(\n"
        '            f"all users of this machine may write to {path}; "\n            f"check',
        "    if False:\n"
        "        raise LocalError(\n"
        '            f"all users of this machine may write to {path}; "\n            f"check',
        FOLDERS + "test_world_writable_folder_is_refused",
    ),
    Mutation(
        MADE_FIRST,
        PRIVATE,
        "    if names and marks is not None and not set(names) & set(marks):",
        "    if False:",
        FOLDERS + "test_folder_with_foreign_files_is_not_made_private",
    ),
    Mutation(
        LINKED,
        PRIVATE,
        "        if path.is_symlink():\n            raise _link_error(path)\n        if make:",
        "        path = path.resolve()\n        if make:",
        FOLDERS + "test_link_in_place_of_a_folder_is_refused",
    ),
    Mutation(
        LINKED,
        PRIVATE,
        "        if path.is_symlink():\n            raise _link_error(path)\n        if make:",
        "        path = path.resolve()\n        if make:",
        FOLDERS + "test_link_in_place_of_the_patches_folder_leaves_its_target_unchanged",
    ),
    Mutation(
        LINKED,
        "p2pcast/files/disk.py",
        "    safe = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC",
        "    safe = os.O_CREAT | os.O_CLOEXEC",
        FOLDERS + "test_link_at_an_opened_name_leaves_its_target_unchanged",
    ),
    Mutation(
        LINKED,
        "p2pcast/state/patch_file.py",
        "                private_folders.check_file(self._fd, self._part)\n",
        "",
        FOLDERS + "test_link_at_an_opened_name_leaves_its_target_unchanged",
    ),
    Mutation(
        LINKED,
        SHADOW,
        "            private_folders.check_file(fd, path)\n",
        "",
        FOLDERS + "test_link_at_an_opened_name_leaves_its_target_unchanged",
    ),
    Mutation(
        LINKED,
        PRIVATE,
        "flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)",
        "flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)",
        FOLDERS + "test_shadow_is_not_opened_through_a_link",
    ),
    Mutation(
        LINKED,
        "p2pcast/state/patch_file.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_RDONLY | os.O_CLOEXEC",
        FOLDERS + "test_patch_is_not_read_through_a_link",
    ),
    Mutation(
        RENAMES,
        "p2pcast/files/private_folders.py",
        "    _check_links(path.parent.absolute())\n",
        "",
        "tests/p2pcast/files/test_private_folders.py::test_folder_behind_another_users_link_is_refused",
    ),
    Mutation(
        RENAMES,
        PRIVATE,
        "        if found.st_mode & stat.S_IWOTH and not (",
        "        if False and not (",
        FOLDERS + "test_folder_that_others_may_rename_is_refused",
    ),
    Mutation(
        READS,
        "p2pcast/files/disk.py",
        "PRIVATE = Modes(0o600, 0o700)",
        "PRIVATE = Modes(0o644, 0o755)",
        FOLDERS + "test_written_files_are_private_unless_requested",
    ),
    Mutation(
        READS,
        PRIVATE,
        "    os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~OTHERS)\n",
        "",
        FOLDERS + "test_folder_of_version_0_1_is_made_private",
    ),
    Mutation(
        READS,
        "p2pcast/files/disk.py",
        "PRIVATE = Modes(0o600, 0o700)",
        "PRIVATE = Modes(0o644, 0o755)",
        USER + "test_another_user_reads_nothing",
    ),
    Mutation(
        READS,
        "p2pcast/process/daemon_process.py",
        "    os.umask(private_folders.UMASK | _original_umask)",
        "    os.umask(_original_umask)",
        FOLDERS + "test_daemon_files_are_private",
    ),
    Mutation(
        OPENED,
        PRIVATE,
        "        os.chmod(name, stat.S_IMODE(found.st_mode) & ~OTHERS, dir_fd=folder)",
        "        pass",
        FOLDERS + "test_folder_of_version_0_1_is_made_private",
    ),
    Mutation(
        OPENED,
        PRIVATE,
        "    if found.st_uid != os.geteuid():\n"
        '        raise LocalError(f"{path} belongs to user {found.st_uid}, who could change',
        '    if False:\n        raise LocalError(f"{path} belongs to user {found.st_uid}, who could change',
        FOLDERS + "test_another_users_file_in_an_open_folder_is_named",
    ),
    Mutation(
        INSTALLS,
        PRIVATE,
        "    if found.st_mode & stat.S_IWOTH:\n"
        '        raise LocalError(\n            f"all users of this machine may write to {path} and',
        '    if False:\n        raise LocalError(\n            f"all users of this machine may write to {path} and',
        FOLDERS + "test_world_writable_shared_folder_is_refused",
    ),
    Mutation(
        INSTALLS,
        PRIVATE,
        "    if found.st_uid not in _trusted():",
        "    if False:",
        FOLDERS + "test_shared_folder_of_another_user_is_refused",
    ),
    Mutation(
        INSTALLS,
        "rollout_node/installers/step_folders.py",
        "            self._mode = private_folders.check_shared(self.folder)",
        "            self._mode = 0o755",
        "tests/rollout_node/installers/test_checkpoint_folder.py::test_installed_files_take_the_access_rights_of_their_folder",
    ),
    Mutation(
        COMMANDS,
        ACCESS,
        "return None if request.method in READING else",
        "return None if True else",
        HTTP + "test_a_command_needs_the_bearer_on_loopback_too",
    ),
    Mutation(
        COMMANDS,
        ACCESS,
        "return None if request.method in READING else",
        "return None if True else",
        USER + "test_another_user_changes_nothing_over_http",
    ),
    Mutation(
        COMMANDS,
        "trainer_node/hub_startup.py",
        "HttpAccess(admission.bearer, config.state.resolve(),",
        "HttpAccess(admission.bearer,",
        USER + "test_another_user_changes_nothing_over_http",
    ),
    Mutation(
        SQUATS,
        "p2pcast/daemon/daemon_requests.py",
        "            if (other := foreign_listener(url, owner)) is not None:",
        "            if (other := None) is not None:",
        USER + "test_the_bearer_token_is_not_sent_to_another_users_listener",
    ),
    Mutation(
        SOCKETS,
        "rollout_node/installers/install_socket.py",
        "            if other_user(sock) is not None:",
        "            if False:",
        USER + "test_another_user_gets_nothing_from_the_install_socket",
    ),
    Mutation(
        SOCKETS,
        "rollout_node/in_engine/install_frames.py",
        "                if (user := other_user(sock)) is not None:",
        "                if (user := None) is not None:",
        USER + "test_a_worker_takes_no_weights_from_another_users_socket",
    ),
    Mutation(
        REBINDS,
        ACCESS,
        "    if (match := _HOST.fullmatch(host)) is None:",
        "    if (match := _HOST.match(host)) is None:",
        HTTP + "test_dns_rebinding_to_loopback_reads_nothing",
    ),
    Mutation(
        FILLS,
        LEFTOVERS,
        "            if left.proved and remove(left):",
        "            if False:",
        LEFT + "test_shadow_of_a_missing_state_folder_is_removed",
    ),
    Mutation(
        FILLS,
        LEFTOVERS,
        "    if os.path.lexists(home) or above.stat().st_dev != device:",
        "    if os.path.lexists(home):",
        LEFT + "test_shadow_of_an_unreachable_state_folder_is_kept",
    ),
    Mutation(
        FILLS,
        LEFTOVERS,
        "        return found is not None and found[0]",
        "        return True",
        LEFT + "test_shadow_claimed_after_the_search_is_kept",
    ),
    Mutation(
        FILLS,
        LEFTOVERS,
        "isinstance(state, str) and not is_in_use(Path(state)) and (_unused_s",
        "isinstance(state, str) and (_unused_s",
        LEFT + "test_shadow_in_use_is_never_removed_for_its_age",
    ),
    Mutation(
        FILLS,
        SHADOW,
        "            folder_locks.lock(fd)",
        "            pass",
        LEFT + "test_locked_shadow_is_kept",
    ),
    Mutation(
        FILLS,
        SHADOW,
        "        if is_at(folder, fd):",
        "        if True:",
        LEFT + "test_folder_removed_during_locking_is_recreated",
    ),
    Mutation(
        FILLS,
        "trainer_node/hub_startup.py",
        "    await asyncio.to_thread(sweep, kept_days=config.shadow_days)\n",
        "",
        "tests/daemons/peer/test_leftover_shadows.py::test_a_start_removes_abandoned_shadows",
    ),
    Mutation(
        FILLS,
        "rollout_node/peer_startup.py",
        "    await asyncio.to_thread(sweep, kept_days=config.shadow_days)\n",
        "",
        "tests/daemons/peer/test_leftover_shadows.py::test_a_start_removes_abandoned_shadows",
    ),
    Mutation(
        "reads the run's page",
        "p2pcast/page/page_routes.py",
        'return self._rights.admits(request.cookies.get(COOKIE, ""))',
        "return True",
        PAGE + "test_a_link_lets_one_browser_read_and_command_nothing",
    ),
    Mutation(
        "reads the run's page",
        "p2pcast/page/reading_rights.py",
        "self._links.pop(_hash(link), None)",
        "self._links.get(_hash(link))",
        PAGE + "test_a_link_lets_one_browser_read_and_command_nothing",
    ),
    Mutation(
        "puts markup into a name",
        "p2pcast/page/static/views.js",
        "if (element.textContent !== text) element.textContent = text;",
        "if (element.innerHTML !== text) element.innerHTML = text;",
        "tests/daemons/page/test_page_in_chromium.py::test_texts_of_peers_stay_texts",
    ),
]
