"""What empties the tables after a test that commits."""

import pytest
from django.apps import apps
from django.contrib.auth.models import Group, Permission, User
from django.core.management import call_command

from idempotency import engine
from idempotency.models import Event, Operation
from tests import callers
from tests.app.management.commands.flush import KEPT
from tests.app.models import Effect


@pytest.mark.django_db(transaction=True)
def test_nothing_stays_but_what_migrating_has_made() -> None:
    engine.run(callers.intent(callers.new_key()), callers.succeed)
    engine.run(callers.intent(key := callers.new_key()), callers.succeed)
    engine.run(callers.intent(key), callers.succeed)
    group = Group.objects.create(name="support")
    group.permissions.set(Permission.objects.all())
    User.objects.create_user("support").groups.add(group)
    assert Operation.objects.exists()
    assert Event.objects.exists()
    assert Effect.objects.exists()
    kept = {model: model._base_manager.count() for model in apps.get_models() if is_kept(model)}

    call_command("flush", verbosity=0, interactive=False)

    for model in apps.get_models(include_auto_created=True):
        assert model._base_manager.count() == kept.get(model, 0), model
    assert len(kept) == len(KEPT)
    assert all(kept.values())


def is_kept(model: type) -> bool:
    return model._meta.db_table in KEPT  # type: ignore[attr-defined]
