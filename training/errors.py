"""The two ways in which a stage ends early on purpose, and their exit codes."""


class UserError(Exception):
    """Something the user can mend: a setting, a file, an input. Exit code 2.

    The message is one line that names the key or file, the value found and what was expected;
    the command line prints it after `error: `, without a traceback.
    """

    exit_code = 2


class RunFailed(Exception):
    """An attempt at a run ended by a fault (a hang, a loss that is not finite, a lost worker). Exit code 1.

    The message is one line that names the rank and the step where they are known. The run itself is intact:
    the same command goes on from the last checkpoint.
    """

    exit_code = 1
