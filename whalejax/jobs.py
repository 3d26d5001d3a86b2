"""Earlier name of ``whalejax.api.job_plans``, which makes plans from jobs."""

from whalejax.api.job_plans import abstract_model as abstract_model
from whalejax.api.job_plans import first_batch as first_batch
from whalejax.api.job_plans import machine as machine
from whalejax.api.job_plans import make_plan as make_plan
from whalejax.api.job_plans import question_of as question_of
from whalejax.api.job_plans import search_plans as search_plans
from whalejax.api.job_plans import split_settings as split_settings
