"""Cannot be imported because a package is missing."""

import no_such_package  # it breaks here


def workload():
    return no_such_package.workload()
