"""The contract suite: what every backend must do, as plain check functions that take a `Target`.

`cases` collects the checks of the modules beside it; `test_contract` runs each on every backend that can run here;
`test_teeth` runs them against faulty copies of the torch backend and expects them to fail.

Ids such as B26 name kinds of faults that users of KDA and gated-delta-rule stacks have reported; each check tests the
property behind its kind. Inputs are hostile by default: weak gates, unequal slots, poisoned rows, padded pools whose
unnamed rows must not change by a bit, and the worst head decides.
"""
